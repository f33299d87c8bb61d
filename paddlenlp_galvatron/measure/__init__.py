"""Measures hardware and model with Paddle and writes the profile files.

`launcher` starts ranks on the `nodes` that a hostfile names. They measure a cluster (`messages`) or a `model`
(`computation`, `memory`, with a `part` of the model on one rank) as `options` say, by a `stopwatch`, and keep numbers
in a `journal`.
"""
