"""Leases in one thread: the machine that ships, a lossy network, leaders that fall, workers that hang and die.

world      one group at the leader of its queue, workers; every event; the invariants
reference  the state by dictionaries: what the columns must be after each record
worlds     the worlds of the random runs
schedules  hand-made schedules that random runs seldom meet
mutants    the machine with one rule removed
"""
