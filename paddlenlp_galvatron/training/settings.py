"""What a training run is told: one validated file that every rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..plan import ModelShape, Plan, Precision, UserError, load_model, read_plan, with_assumptions
from ..plan.check import require_model, require_valid
from ..plan.files import read_json, write_text
from .recipe import Recipe


class TrainSettings(BaseModel):
    """A training run. Paths are absolute or relative to where it is started."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: Path = Field(description="strategy file")
    model: str = Field(description="config.json, its folder, or the name of a preset")
    output: Path = Field(description="folder of train_log.jsonl and of the ranks' logs")
    data: str | None = Field(
        None, description='Megatron data without .bin/.idx, a folder, or "0.7 a 0.3 b"; absent: random tokens'
    )
    split: str = Field("949,50,1", description="shares of the documents for training, validation and test")
    steps: int = Field(ge=1, description="optimizer steps")
    world_size: int = Field(ge=1, description="ranks that are started")
    seq_length: int | None = Field(None, ge=1, description="tokens of a sample; absent: the plan's")
    sequence_parallel: bool | None = Field(None, description="Megatron-SP; absent: as the plan says")
    mixed_precision: Precision | None = Field(None, description="type of weights and messages; absent: the plan's")
    amp_master_grad: bool = Field(False, description="16-bit training sums and reduces gradients in fp32")
    compute_precision: Precision | None = Field(
        None, description="what layers compute in; absent: mixed_precision on GPUs, fp32 on CPUs"
    )
    save_steps: int = Field(0, ge=0, description="steps from one checkpoint to the next; 0: none but on SIGTERM")
    save_total_limit: int = Field(2, ge=1, description="how many checkpoints are kept, the newest")
    resume_from_checkpoint: str = Field("auto", description="auto: the newest whole one, if any; none; or a folder")
    on_nonfinite: Literal["stop", "skip"] = Field("stop", description="a step whose loss or gradients are NaN or Inf")
    seed: int = Field(0, ge=0, description="of weights and of the data's order")
    recipe: Recipe = Recipe()

    @property
    def log(self) -> Path:
        """One JSON line a step."""
        return self.output / "train_log.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.output / "checkpoints"

    @property
    def traffic(self) -> Path:
        """What the first step sent: groups, and calls and bytes by collective."""
        return self.output / "traffic.json"

    def load(self) -> tuple[Plan, ModelShape]:
        """The plan and the model, checked against each other and the world. Raises UserError."""
        plan = read_plan(self.plan, self.world_size)
        plan = with_assumptions(
            plan,
            seq_length=self.seq_length,
            sequence_parallel=self.sequence_parallel,
            mixed_precision=self.mixed_precision,
        )
        shape = load_model(self.model)
        if plan.assumed.seq_length is None:
            raise UserError(f"{self.plan}: names no seq_length; pass --seq_length")
        require_model(plan, shape)
        require_valid(plan, shape)
        return plan, shape

    def save(self, path: Path) -> None:
        write_text(path, self.model_dump_json(indent=2) + "\n")


def read_settings(path: str | Path) -> TrainSettings:
    """Raises UserError with one line a fault."""
    try:
        return TrainSettings.model_validate(read_json(path))
    except ValidationError as error:
        raise UserError(f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()) from None
