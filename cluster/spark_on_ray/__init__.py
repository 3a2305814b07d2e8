"""Spark 4 on Ray: Spark's own standalone cluster, as long as one driver needs it. Programs use `raymq.spark`.

standalone_session  a SparkSession whose executors run in actors of Ray
standalone_options  the options of the Master, of the Workers and of the driver
spark_worker        the actor of one executor
guarded_daemon      starts a Master or a Worker under a guard, and ends both
guard               the program above a daemon: it restarts the daemon, and ends its whole tree with its owner
"""
