"""A small model in one process, its optimizer and its data, and what continues from its checkpoints."""

from pathlib import Path

from paddlenlp_galvatron.check.parity.parity import small_case
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.paddle_private import next_rate
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.training.data.source import BatchSource, RandomData
from paddlenlp_galvatron.training.run import resume
from paddlenlp_galvatron.training.settings import TrainSettings

from .plans import plan

CASE = small_case(plan(1, "1 1"), "llama", "adamw")
BATCH = CASE.plan.global_batch


class Run:
    """An engine, its optimizer and its data."""

    def __init__(self, seed: int = 0, batch: int = BATCH):
        self.engine = Engine(ModelSetup.of(CASE.plan, CASE.shape, CASE.seq_length))
        self.optimizer = CASE.recipe.build(self.engine.tensors, self.engine.decaying)
        self.data: BatchSource = RandomData(CASE.shape.vocab_size, CASE.seq_length, batch, seed)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self.engine.forward_backward(self.data.batch(self.engine.steps_done)))
            self.engine.update(self.optimizer, 1.0)
            next_rate(self.optimizer)
        return losses

    def resume(self, folder: Path, wanted: str = "auto") -> int:
        settings = TrainSettings(
            plan=Path("plan"), model="model", world_size=1, output_dir=folder.parent, resume_from_checkpoint=wanted
        )
        assert settings.checkpoints == folder
        return resume(settings, self.engine, self.optimizer, self.data)
