"""`import paddlenlp_galvatron.register` gives PaddleNLP's trainer package GalvatronTrainer and its arguments."""

import paddlenlp.trainer

from .runtime.groups import prepare_world
from .training.paddlenlp.arguments import GalvatronTrainingArguments
from .training.paddlenlp.trainer import GalvatronTrainer

prepare_world()  # before PaddleNLP's arguments initialize the process group
paddlenlp.trainer.GalvatronTrainer = GalvatronTrainer
paddlenlp.trainer.GalvatronTrainingArguments = GalvatronTrainingArguments
