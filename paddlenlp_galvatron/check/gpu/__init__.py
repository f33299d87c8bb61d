"""The parts of `galvatron gpu-check`, which tests in minutes whether a node trains correctly.

`run` runs the parts within their time: `kernels`, `parity` (and schedules), `faults` (resume, memory, traced steps),
`beside`, `prediction`, `stock`. Each gives `findings`; run as a program, its file is one rank of it.
"""
