"""What needs Ray: start, connect, operations, the command line.

start          creates a cluster, or resumes one
connect        finds a running cluster
cluster        `Cluster`, from which producers and consumers are made
stop           ends a cluster
record/        what is known of a cluster without Ray: its options, its directory, its placement
deploy/        the Ray under a cluster, and its actors
controller/    the controller of a cluster, which watches its replicas
operations/    the operations of an operator on a cluster that runs
queue/         `raymq.Queue` and its coordinator
ray_data/      topics as datasets of Ray Data
ray_serve/     tasks of Ray Serve in topics
spark_on_ray/  Spark 4 on Ray
cli/           the command line
bench/         `raymq bench`
"""
