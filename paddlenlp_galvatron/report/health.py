"""The health of a running job, from its log and its plan: one line, and warnings where the plan's prediction is off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ..plan import ModelShape, Plan
from .prediction import WARM_UP_STEPS, Predicted, stage_peaks_mib

Record = Mapping[str, Any]  # a line of train_log.jsonl

WINDOW_STEPS = 20  # latest steps, of which medians are taken
ENOUGH_STEPS = 10  # fewer say nothing yet
TOLERANCE = 0.15  # of a prediction
GIB_MIB = 1024


def flops_per_token(shape: ModelShape, seq_length: int, frozen: bool = False) -> float:
    """Floating-point operations of a token, forward and backward, recompute left out: what MFU counts.

    6 for each weight that tokens are multiplied with and 12 * layers * hidden * sequence for attention's two products
    (PaLM, arXiv:2204.02311, appendix B). The embedding is looked up, not multiplied, unless it is the LM head as well.
    `frozen` weights, beside which adapters learn, count 4 instead of 6: they have no gradients.
    """
    looked_up = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    return (4 if frozen else 6) * (shape.active_parameters - looked_up) + 12 * shape.layers * shape.q_width * seq_length


class Health:
    """Warnings from the log of one run under a plan, each once."""

    def __init__(
        self,
        plan: Plan,
        shape: ModelShape,
        peak_tflops: float | None = None,
        steps: int | None = None,
        on: str = "GPU",
        frozen: bool = False,
    ):
        """`peak_tflops`: TFLOP/s of a device at its best, for MFU. `steps`: of the whole run, for ETA. `on`: what
        a rank runs on. `frozen`: only adapters learn."""
        self._steps, self._on = steps, on
        self._plan, self._predicted = plan, Predicted.of(plan)
        self._flops = flops_per_token(shape, plan.assumed.seq_length or 0, frozen)
        self._peak_flops_per_s = peak_tflops * 1e12 * plan.world_size if peak_tflops else None
        self._said: set[str] = set()

    def line(self, records: Sequence[Record]) -> str:
        """Where the run stands: its last step, speed and memory of its latest ones, and what the plan predicts."""
        last, latest = records[-1], records[-WINDOW_STEPS:]
        tokens_per_s = median(record["tokens_per_s"] for record in latest)
        step_s = median(record["step_time_s"] for record in latest)
        parts = [
            f"step {last['step'] + 1}" + (f"/{self._steps}" if self._steps else ""),
            f"loss {last['loss']:.4f}",
            f"lr {last['lr']:.3g}",
            f"grad norm {last['grad_norm']:.3g}",
            f"{tokens_per_s / self._plan.world_size:,.0f} tokens/s/{self._on}",
        ]
        if "filled" in last:
            targets_per_s = median(record["target_tokens_per_s"] for record in latest)
            parts.append(f"{targets_per_s:,.0f} target tokens/s, rows filled to {last['filled']:.0%}")
        if self._peak_flops_per_s:
            parts.append(f"MFU {tokens_per_s * self._flops / self._peak_flops_per_s:.1%}")
        parts.append(f"{last['step_time_s']:.4g} s (median {_beside(step_s, self._predicted.step_s, 's')})")
        stages = stage_peaks_mib(self._plan, latest)
        fullest = max(range(len(stages)), key=lambda stage: stages[stage])
        guess_mib = self._predicted.memory_mib[fullest] if self._predicted.memory_mib else None
        where = f" on stage {fullest}" if len(stages) > 1 else ""
        parts.append(f"memory{where} " + _beside(stages[fullest], guess_mib, "MiB"))
        if self._steps:
            parts.append(f"ETA {_duration((self._steps - last['step'] - 1) * step_s)}")
        return ", ".join(parts)

    def warnings(self, records: Sequence[Record], start: int = 0) -> list[str]:
        """New warnings of figures off by more than `TOLERANCE`. `start`: the first step of this process."""
        settled = [record for record in records if record["step"] >= start + WARM_UP_STEPS][-WINDOW_STEPS:]
        if len(settled) < ENOUGH_STEPS:
            return []
        new = [(key, text) for key, text in self._drifts(settled) if key not in self._said]
        self._said.update(key for key, _ in new)
        return [text for _, text in new]

    def _drifts(self, records: Sequence[Record]) -> Iterator[tuple[str, str]]:
        step_s = median(record["step_time_s"] for record in records)
        if self._predicted.step_s and _is_off(step_s, self._predicted.step_s):
            yield (
                "time",
                f"a step takes {_beside(step_s, self._predicted.step_s, 's')}; measure again, then search again: "
                f"{self._what_is_slow()}",
            )
        stages = stage_peaks_mib(self._plan, records)
        for stage, (peak_mib, guess_mib) in enumerate(zip(stages, self._predicted.memory_mib, strict=False)):
            if _is_off(peak_mib, guess_mib):
                yield (
                    f"memory of stage {stage}",
                    f"stage {stage} needs {_beside(peak_mib, guess_mib, 'MiB')}; measure again, then search again: "
                    "galvatron profile memory",
                )

    def _what_is_slow(self) -> str:
        if self._plan.world_size == 1:
            return "galvatron profile computation"
        return "galvatron profile computation and galvatron profile hardware"


def _duration(seconds: float) -> str:
    """`2 d 03:04:05`, without days where there is none."""
    days, rest = divmod(round(seconds), 24 * 3600)
    return (f"{days} d " if days else "") + f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def _is_off(measured: float, predicted: float) -> bool:
    return abs(measured / predicted - 1) > TOLERANCE


def _beside(measured: float, predicted: float | None, unit: str) -> str:
    """`1.3 s (predicted 1.2 s, +8%)`; what rounds to none is +0%."""
    if not predicted:
        return f"{measured:.4g} {unit}"
    return f"{measured:.4g} {unit} (predicted {predicted:.4g} {unit}, {round(measured / predicted - 1, 2) + 0.0:+.0%})"
