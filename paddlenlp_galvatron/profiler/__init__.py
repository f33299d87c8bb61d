"""Measures hardware and model with Paddle and writes the profile files.

`launcher` starts ranks on the `nodes` that a hostfile names. They measure a cluster (`messages`, with `overlap`) or a
`model` at `points` (`computation`, `memory`, with a `part` of the model on one rank) by a `stopwatch`, and keep
numbers in a `journal`. `used` counts a GPU's memory beside tensors.
"""
