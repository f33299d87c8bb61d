"""The parts of `galvatron gpu-check`, which tests in minutes whether a node trains correctly.

`run` runs the parts within their time: `kernels`, `parity` (and schedules), `faults` (resume, memory, traced steps),
`overlap`, `prediction`, `stock`. Each gives `findings`; `kernels`, `faults` and `overlap`, run as programs, are a rank.
"""
