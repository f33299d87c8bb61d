"""Trains a model by a plan: the training loop, `data` and `checkpoint`s.

Options: `prepare` makes a run of them, `settings` is the file that every rank reads, `arguments` are PaddleNLP's
names. `train_worker` is a rank; `trainer` is PaddleNLP's Trainer on the runtime's engine. It begins with weights and
data (`beginning`, `resume`, `inputs`, `reference`), updates by a `recipe`, guards (`nonfinite`), evaluates
(`evaluation`), logs (`step_log`), and answers PaddleNLP's callbacks (`loader`, `local_model`, `unsupported`).
"""
