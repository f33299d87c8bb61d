"""train_log.jsonl: one JSON line a step."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any, BinaryIO, NotRequired, TypedDict

from ..base.errors import GalvatronError, UserError
from ..base.locking import is_named
from ..base.reading import parse_json
from ..base.text import without_prefix
from ..base.units import MIB
from ..base.writing import reason_of, whole_file

LONGEST_LINE_BYTES = 4 * MIB  # of other programs, too
MOST_PEAKS = 64  # ranks whose peaks of memory a line has one by one; those of 1,024 would be 18 KB in every line


# How a rank begins the lines of its own log that its launcher shows.
STOPPED, EVALUATED = "stopped by a signal after", "evaluated after"
NEWS = ("resuming from ", "writing ", "saved ", "removed ", "warning: ", STOPPED, EVALUATED)
NUMBERS = ("loss", "lr", "grad_norm", "step_time_s", "tokens_per_s")  # of a record, besides its step
NAN = ("loss", "grad_norm", "eval_loss")  # may be no finite number, for which JSON has null


class StepRecord(TypedDict):
    """One line of train_log.jsonl."""

    step: int  # from 1
    steps: int  # of the whole run; a line of an older log lacks it, and counts from 0
    loss: float
    lr: float
    grad_norm: float  # no finite number: the step was left out
    step_time_s: float  # from the end of the step before, with the loading of data
    data_s: float  # of it, in which the step waited for its rows of the data
    tokens_per_s: float
    plan: str  # its `plan_id`
    peak_memory_mib: list[float]  # of every rank; above MOST_PEAKS the highest of each stage
    peak_memory_rank: int  # with the highest peak
    target_tokens_per_s: NotRequired[float]  # in fine-tuning: of tokens that are learnt
    filled: NotRequired[float]  # in fine-tuning: share of the tokens that is not padding
    moe_imbalance: NotRequired[float]  # rows of the busiest rank of experts over the mean, on average over layers
    moe_imbalance_most: NotRequired[float]  # and in the layer and micro-batch where it was largest
    metrics: NotRequired[dict[str, float]]  # in DPO: rewards and the like; with experts: aux_loss, if it is on
    eval_loss: NotRequired[float]  # of the validation split, after this step
    eval_metrics: NotRequired[dict[str, float]]  # its accuracy; in DPO rewards and the like


def peaks_to_log(peaks_mib: Sequence[float], stages: int) -> list[float]:
    """`peak_memory_mib` of a record, of every rank's; ranks of a stage are neighbours."""
    size = len(peaks_mib) // stages if len(peaks_mib) > MOST_PEAKS else 1
    return [max(peaks_mib[first : first + size]) for first in range(0, len(peaks_mib), size)]


def means_of(records: Sequence[StepRecord]) -> dict[str, float]:
    """Means over some steps, by PaddleNLP's names; rate and norm are those of the last one."""
    means = {
        "loss": mean(record["loss"] for record in records),
        "learning_rate": records[-1]["lr"],
        "grad_norm": records[-1]["grad_norm"],
        "peak_memory_mib": max(max(record["peak_memory_mib"]) for record in records),
    }
    if "moe_imbalance" in records[-1]:
        means["moe_imbalance"] = mean(record["moe_imbalance"] for record in records)
    metrics = [record["metrics"] for record in records if "metrics" in record]
    return means | {name: mean(one[name] for one in metrics) for name in (metrics[0] if metrics else ())}


class StepLog:
    """Writes the log, flushed after every line: a killed run loses none of a step that it has logged."""

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO | None = None
        self._last = (-1, 0)  # step of the last line, and where in the file it begins

    def write(self, record: StepRecord) -> None:
        """Lines of this step and later ones are from a run that this one goes back behind: the first write drops them,
        and text that is no line of a log. A step that is written again, with more in it, takes its line's place. Raises
        GalvatronError: the log cannot be written."""
        try:
            line = json.dumps(_strict(record), allow_nan=False).encode() + b"\n"
            if self._file is None:
                self._begin(record["step"], line)
                self._file = self._path.open("r+b")
                place = self._file.seek(-len(line), os.SEEK_END)
            elif not is_named(self._file.fileno(), self._path):
                raise GalvatronError(f"{self._path}: was removed while this run wrote it; the run ends")
            else:
                step, place = self._last
                place = self._file.seek(*((place,) if step == record["step"] else (0, os.SEEK_END)))
                self._file.write(line)
                self._file.flush()
            self._last = (record["step"], place)
        except OSError as error:
            raise GalvatronError(f"{self._path}: cannot be written: {reason_of(error)}") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self, step: int, first: bytes) -> None:
        with whole_file(self._path) as kept:
            for line, record in _read(self._path):
                if record["step"] < step:
                    kept.write(line)
            kept.write(first)


def _strict(record: StepRecord) -> dict[str, Any]:
    """The record as JSON: null stands for a number that JSON does not have."""
    numbers = {name: value for name, value in record.items() if not isinstance(value, dict)}
    for name in ("metrics", "eval_metrics"):
        if name in record:
            numbers[name] = {key: one if math.isfinite(one) else None for key, one in record[name].items()}
    return {**numbers, **{name: None for name in NAN if not math.isfinite(record.get(name, 0.0))}}  # type: ignore[arg-type]


def read_log(path: Path) -> list[StepRecord]:
    """All records of a log, or of a copy of it with a launcher's prefixes."""
    return [record for _, record in _read(path)]


def _read(path: Path) -> Iterator[tuple[bytes, StepRecord]]:
    """Lines of a log with their records; one warning names those that have none."""
    damaged = []
    for number, line in enumerate(map(without_prefix, _lines(path)), 1):
        if record := record_of(line):
            yield line, record
        else:
            damaged.append(number)
    if damaged:
        sys.stderr.write(f"warning: {path}: {len(damaged)} damaged lines are skipped, the first is line {damaged[0]}\n")


def _lines(path: Path) -> Iterator[bytes]:
    """Lines that were written to their end; the last one may be cut off, by a kill."""
    if path.exists():
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE_BYTES):
                if line.endswith(b"\n") or len(line) == LONGEST_LINE_BYTES:
                    yield line


def record_of(line: bytes) -> StepRecord | None:
    """A line as a log has them; None for bytes left by a loss of power or another program."""
    try:
        record: Any = parse_json(line.decode(), "a line")
    except (UserError, UnicodeDecodeError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    if "steps" not in record:
        record["step"] += 1
    record |= {name: math.nan for name in NAN if record.get(name, 0.0) is None}
    if any(type(record.get(name)) not in (int, float) for name in NUMBERS) or not line.endswith(b"\n"):
        return None
    whole: StepRecord = record  # type: ignore[assignment]
    return whole
