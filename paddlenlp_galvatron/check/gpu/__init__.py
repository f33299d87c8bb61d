"""The parts of `galvatron gpu-check`, which tests in minutes whether a node trains correctly.

`run` runs the parts within their time: `kernels`, `parity` (and schedules), `faults` (resume, memory, traced steps),
`beside`, `prediction`, `stock`. Each gives `findings`; `kernels`, `faults` and `beside`, run as programs, are a rank.
"""
