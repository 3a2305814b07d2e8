"""Consumer groups in one thread: the machines that ship, a lossy network, crashes, clocks that differ.

world      one coordinator, one shard with queues, members; every event; the invariants
reference  the rules written down a second time, short and slow
compared   a world in which the reference decides as well, and must agree
walks      random runs
search     all schedules, up to bounds
schedules  hand-made schedules that random runs seldom meet
mutants    the machines with one rule removed
"""
