"""Starts the processes of a launch on this node and others, watches them, and says which one failed first, and why.

`processes` starts and ends ranks; options or a cluster's variables (`clusters`) say
which `nodes` there are; `hosts` reads lists of hosts; ranks meet at a `store`. Failures: `status` is shared with each
rank, `out_of_memory` detected, `faults` blames a rank of a node, `watch` one of several. GPUs and NCCL's defaults:
`gpus`.
"""
