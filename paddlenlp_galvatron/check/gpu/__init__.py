"""The parts of `galvatron gpu-check`, which tests in minutes whether a node trains correctly.

`run` runs the parts within their time: `kernels`, `parity` (and schedules), `faults` (resume, memory, traced steps),
`prediction`. Each part gives `findings`; `kernels` and `faults` run as a program are a rank.
"""
