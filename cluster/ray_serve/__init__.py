"""Ray Serve: deployments whose tasks are messages of a topic. Programs import `raymq.serve`.

task_adapter    the adapter of Serve's task consumers
adapter_config  its options
task_runner     leases tasks, runs their handlers, and settles them
task_message    a task as a message
task_results    the results, in a compacted topic
lag_policy      as many replicas as there are tasks to do
"""
