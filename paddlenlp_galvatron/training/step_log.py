"""train_log.jsonl: one JSON line a step, and lines of events between them."""

import fcntl
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean as mean
from typing import Any, BinaryIO, NotRequired, TypedDict

from ..base import MIB, GalvatronError, UserError, without_prefix
from ..base.reading import parse_json
from ..base.writing import is_named, reason_of, whole_file

LONGEST_LINE_BYTES = 4 * MIB  # limit for other programs' lines, too
TAIL_BYTES = 2**16  # more than a line of ours has
MOST_PEAKS = 64  # ranks up to which a line has every rank's peak memory; 1,024 would take 18 KB per line


# Prefixes of the lines in a rank's log that its launcher shows.
STOPPED, EVALUATED = "stopped by a signal after", "evaluated after"
CHANGED = "note: not as in the run that wrote the checkpoint: "
NEWS = ("resuming from ", CHANGED, "writing ", "saved ", "removed ", "warning: ", STOPPED, EVALUATED)
NUMBERS = ("loss", "lr", "grad_norm", "step_time_s", "tokens_per_s")  # numbers of a record besides its step
NAN = ("loss", "grad_norm", "eval_loss")  # may be not finite, then null in JSON
RUN = "GALVATRON_RUN"  # environment: the run's id, from a launcher to its ranks
Event = dict[str, Any]  # a line with `event`, its kind; `time` and `run` as steps have them; and `text` for people


class StepRecord(TypedDict):
    """One line of train_log.jsonl."""

    step: int  # counted from 1
    steps: int  # of the whole run; older logs lack it and count from 0
    loss: float
    lr: float
    grad_norm: float  # not finite: the step was skipped
    step_time_s: float  # since the end of the previous step, including data loading
    data_s: float  # part of it waiting for data
    tokens_per_s: float
    plan: str  # its `plan_id`
    time: NotRequired[str]  # of its end, UTC, as `now` writes it; lines of older logs lack it
    run: NotRequired[str]  # the id of the run, a new one at every start
    peak_memory_mib: list[float]  # of every rank; above MOST_PEAKS the highest of each stage
    peak_memory_rank: int  # rank with the highest peak
    target_tokens_per_s: NotRequired[float]  # fine-tuning: tokens that are learnt
    filled: NotRequired[float]  # in fine-tuning: share of the tokens that is not padding
    moe_imbalance: NotRequired[float]  # experts' rows of the busiest rank / mean, mean over layers
    moe_imbalance_most: NotRequired[float]  # its maximum over layers and micro-batches
    metrics: NotRequired[dict[str, float]]  # in DPO: rewards and the like; with experts: aux_loss, if it is on
    eval_loss: NotRequired[float]  # loss of the validation split after this step
    eval_metrics: NotRequired[dict[str, float]]  # its accuracy; in DPO rewards and the like


def peaks_to_log(peaks_mib: Sequence[float], stages: int) -> list[float]:
    """`peak_memory_mib` of a record, of every rank's; ranks of a stage are neighbours."""
    size = len(peaks_mib) // stages if len(peaks_mib) > MOST_PEAKS else 1
    return [max(peaks_mib[first : first + size]) for first in range(0, len(peaks_mib), size)]


def means_of(records: Sequence[StepRecord]) -> dict[str, float]:
    """Means over several steps, by PaddleNLP's names; rate and norm are of the last step."""
    means = {
        "loss": mean(record["loss"] for record in records),
        "learning_rate": records[-1]["lr"],
        "grad_norm": records[-1]["grad_norm"],
        "peak_memory_mib": max(max(record["peak_memory_mib"]) for record in records),
    }
    if "moe_imbalance" in records[-1]:
        means["moe_imbalance"] = mean(record["moe_imbalance"] for record in records)
    metrics = [record["metrics"] for record in records if "metrics" in record]
    return means | {name: mean(values[name] for values in metrics) for name in (metrics[0] if metrics else ())}


def now() -> str:
    """The time, UTC, in ISO 8601: `2026-11-28T09:40:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def new_run() -> str:
    """The id that the launcher gave, or else a new one."""
    return os.environ.get(RUN) or secrets.token_hex(4)


def new_event(run: str | None, event: str, text: str, **facts: Any) -> Event:
    """An event that happens now."""
    return {"event": event, "time": now(), "run": run, **facts, "text": text}


def append_event(path: Path, event: Event) -> None:
    """Add an event's line after the last whole line. Raises OSError."""
    with path.open("a+b", buffering=0) as file, _alone(file):
        end = file.seek(0, os.SEEK_END)
        tail = os.pread(file.fileno(), TAIL_BYTES, max(0, end - TAIL_BYTES))
        file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)  # drops a line that a kill cut off
        file.write(json.dumps(event).encode() + b"\n")


@contextmanager
def _alone(file: Any) -> Iterator[None]:
    """Lock the log, so that neither the launcher nor the writer of checkpoints adds an event. Some file systems have no
    locks."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


class StepLog:
    """Writes the log, flushed after every line: a killed run loses no logged step."""

    def __init__(self, path: Path):
        self.path, self.run = path, new_run()
        self._file: BinaryIO | None = None
        self._last = (-1, 0, 0)  # step of the last line, its start and end in the file
        self._waiting: list[Event] = []  # events before the first step

    def event(self, event: str, text: str, **facts: Any) -> None:
        """Add an event; those before the first step are written with it. An event that cannot be written is a
        warning."""
        made = new_event(self.run, event, text, **facts)
        if self._file is None:
            self._waiting.append(made)
            return
        try:
            append_event(self.path, made)
        except OSError as error:
            sys.stderr.write(f"warning: {self.path}: the event {event} cannot be written: {reason_of(error)}\n")

    def write(self, record: StepRecord) -> None:
        """The first write drops records of this and later steps, left by a run that was resumed earlier, and damaged
        lines. Events stay, and this run's first event names the dropped steps. Writing a step again replaces its line.
        Raises GalvatronError if the log cannot be written."""
        try:
            line = json.dumps(_strict(record), allow_nan=False).encode() + b"\n"
            if self._file is None:
                self._begin(record["step"], line)
                self._file = self.path.open("r+b")
                end = self._file.seek(0, os.SEEK_END)
                self._last = (record["step"], end - len(line), end)
            elif not is_named(self._file.fileno(), self.path):
                raise GalvatronError(f"{self.path}: was removed while this run wrote it; the run ends")
            else:
                with _alone(self._file):
                    self._write_line(record["step"], line)
        except OSError as error:
            raise GalvatronError(f"{self.path}: cannot be written: {reason_of(error)}") from None

    def _write_line(self, step: int, line: bytes) -> None:
        assert self._file
        last, offset, end = self._last
        events = b""
        if step == last:
            self._file.seek(end)
            events = self._file.read()
        offset = self._file.seek(*((offset,) if step == last else (0, os.SEEK_END)))
        self._file.write(line + events)
        self._file.flush()
        self._last = (step, offset, offset + len(line))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self, step: int, first: bytes) -> None:
        lost: list[float] = []  # seconds of the steps
        run: str | None = None  # id of the previous run
        with whole_file(self.path) as kept:
            for line, record in _read(self.path):
                run = record.get("run", run) if record else run
                if record and record["step"] >= step:
                    lost.append(record["step_time_s"])
                else:
                    kept.write(line)
            for event in self._waiting[:1]:
                event |= {"previous_run": run, "lost_steps": len(lost), "lost_s": round(sum(lost), 3)}
            kept.writelines(json.dumps(event).encode() + b"\n" for event in self._waiting)
            kept.write(first)


def _strict(record: StepRecord) -> dict[str, Any]:
    """The record as JSON, with null for NaN and infinities."""
    numbers = {name: value for name, value in record.items() if not isinstance(value, dict)}
    for name in ("metrics", "eval_metrics"):
        if name in record:
            numbers[name] = {key: value if math.isfinite(value) else None for key, value in record[name].items()}
    return {**numbers, **{name: None for name in NAN if not math.isfinite(record.get(name, 0.0))}}  # type: ignore[arg-type]


def read_log(path: Path) -> list[StepRecord]:
    """All records of a log, or of a copy of it with a launcher's prefixes."""
    return [record for _, record in _read(path) if record]


def _read(path: Path) -> Iterator[tuple[bytes, StepRecord | None]]:
    """Lines of a log with their records (None: an event); one warning names the damaged lines."""
    damaged = []
    for number, line in enumerate(map(without_prefix, _lines(path)), 1):
        record = record_of(line)
        if record or event_of(line):
            yield line, record
        else:
            damaged.append(number)
    if damaged:
        sys.stderr.write(f"warning: {path}: {len(damaged)} damaged lines are skipped, the first is line {damaged[0]}\n")


def _lines(path: Path) -> Iterator[bytes]:
    """Complete lines; a kill may have truncated the last line."""
    if path.exists():
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE_BYTES):
                if line.endswith(b"\n") or len(line) == LONGEST_LINE_BYTES:
                    yield line


def _object_of(line: bytes) -> dict[str, Any]:
    """A line's JSON object, empty for other bytes."""
    try:
        content: Any = parse_json(line.decode(), "a line")
    except (UserError, UnicodeDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def event_of(line: bytes) -> Event | None:
    """An event's line; None for other lines."""
    event = _object_of(line)
    return event if isinstance(event.get("event"), str) and isinstance(event.get("text"), str) else None


def record_of(line: bytes) -> StepRecord | None:
    """A step's line; None for an event's, and for bytes left by a power failure or another program."""
    record = _object_of(line)
    if "event" in record or type(record.get("step")) is not int:
        return None
    if "steps" not in record:
        record["step"] += 1
    record |= {name: math.nan for name in NAN if record.get(name, 0.0) is None}
    if any(type(record.get(name)) not in (int, float) for name in NUMBERS) or not line.endswith(b"\n"):
        return None
    whole: StepRecord = record  # type: ignore[assignment]
    return whole
