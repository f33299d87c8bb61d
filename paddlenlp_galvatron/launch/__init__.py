"""Starts the processes of a launch on all nodes, watches them, and reports which rank failed first and why.

`processes` starts and ends ranks; `nodes` come from options or a cluster's variables (`clusters`); `hosts` reads lists
of hosts; ranks connect through a `store`. Failures: each rank shares its `status`, `out_of_memory` detects missing
memory, `faults` finds the rank at fault on a node, `watch` across nodes. GPUs and NCCL's defaults: `gpus`.
"""
