"""A simulator of a shard's replicas: the machines that ship, under a virtual clock, network and disk.

world      replicas, producers, network and disks in memory, and the invariants
store      what a replica's store makes of its log
search     all schedules of a few exchanges
mutants    machines with one rule removed
chaos      random faults of one seed, and the end in which everything heals
schedules  rare schedules, step by step
"""
