"""Trains a model by a plan: the training loop, `data` and `checkpoint`s.

Options: `settings` is the record that every rank reads, `prepare` makes it from options, `arguments` from a script's.
`train_worker` is a rank; `trainer` is PaddleNLP's Trainer on the runtime's engine. It begins with weights
(`initial_weights`, `resume`) and data (`inputs`), updates by a `recipe`, logs (`step_log`), and answers PaddleNLP's
callbacks (`surface`).
"""
