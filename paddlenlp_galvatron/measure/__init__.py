"""Measures hardware and model with Paddle and writes the profile files.

`launcher` starts ranks on the `nodes` of a hostfile. They measure a cluster (`messages`) or a `model` (`computation`,
`memory`, with a `part` of the model on one rank) by the `options`, with a `stopwatch`, and keep numbers in a `journal`.
"""
