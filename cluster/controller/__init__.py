"""The controller of a cluster: it watches, suggests and makes known. It has no authority (rule R19 of docs/design.md).

cluster_watch       judges what replicas say of themselves over time: metrics, and the leadership to give back
controller_metrics  the metrics of a controller
controller          looks, reports, makes forgotten actors again, publishes routes, suggests moves
actor               its Ray actor
controller_actor    that actor: made by each start, ended by stop
"""
