"""Trains a model by a plan: the training `loop`, `data` and `checkpoint`s.

`settings` is the record that every rank reads; `prepare` makes it from options. A rank makes a `run` from it: weights
(`initial_weights`, or a checkpoint), data (`inputs`) and the optimizer (`recipe`). The `loop` trains, announces
`events`, writes the log (`step_log`) and evaluates. `paddlenlp` is PaddleNLP's Trainer on this loop.
"""
