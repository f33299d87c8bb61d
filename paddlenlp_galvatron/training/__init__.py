"""Trains a model by a plan: the training `loop`, `data` and `checkpoint`s.

`settings` is the record that every rank reads, and `prepare` makes it from options. A rank makes a `run` of it: weights
(`initial_weights`, or a checkpoint), data (`inputs`) and the optimizer (`recipe`). The `loop` trains it, announces
`events`, writes the log (`step_log`) and evaluates. `paddlenlp` is PaddleNLP's Trainer on this loop.
"""
