"""PaddleNLP's Trainer on the training loop: its arguments, callbacks, data sets and communicate group."""
