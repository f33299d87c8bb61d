"""Starts the ranks of a training run on this node, and tells from its log how it does."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, TaskID

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.process import heeded
from paddlenlp_galvatron.base.reading import NewLines, read_json
from paddlenlp_galvatron.base.text import near
from paddlenlp_galvatron.launch import gpus
from paddlenlp_galvatron.launch.nodes import Nodes
from paddlenlp_galvatron.plan import ModelShape, Plan, Precision
from paddlenlp_galvatron.report.measured import Health, of_plan, out_of_memory_report, traffic_table
from paddlenlp_galvatron.training.step_log import StepRecord, record_of

if TYPE_CHECKING:
    from paddlenlp_galvatron.training.settings import TrainSettings

KEPT = 64  # latest records of the log, of which health is told
TOLD = ("resuming from ", "writing ", "saved ", "warning: ")  # how rank 0 begins what it says of checkpoints


class LogTail:
    """The end of a log, read as it grows. A run begins by writing its log anew, with the lines that it goes on behind:
    one that lies there from before is no news. The run may have begun under another plan."""

    def __init__(self, path: Path, plan: Plan):
        self._path, self._plan, self._lines = path, plan, NewLines(path)
        self._before = path.stat().st_ino if path.exists() else None
        self.count = 0
        self.first: StepRecord | None = None
        self.latest: deque[StepRecord] = deque(maxlen=KEPT)  # of this plan
        self.start = 0  # the first step of this run, or one close to it

    @property
    def begun(self) -> bool:
        """Whether the run has written records, taken in or not."""
        with suppress(FileNotFoundError):
            now = self._path.stat()
            return now.st_ino != self._before and now.st_size > 0
        return False

    def read(self) -> bool:
        """Take in new records, and say whether there are any of this plan."""
        if not self.begun:
            return False
        records = [record for line in self._lines.read() if (record := record_of(line))]
        if records and not self.count:
            self.first, self.start = records[0], records[-1]["step"]
        self.count += len(records)
        self.latest.extend(own := of_plan(self._plan, records))
        return bool(own)


class CheckpointNews:
    """News of checkpoints in a rank's growing log."""

    def __init__(self, path: Path):
        self._lines = NewLines(path)

    def read(self) -> list[str]:
        texts = [line.decode(errors="replace").rstrip("\n") for line in self._lines.read()]
        return [text for text in texts if text.startswith(TOLD)]


class TrainingRun:
    """One run, from its start to its end."""

    def __init__(self, console: Console, settings: TrainSettings, plan: Plan, shape: ModelShape, steps: int):
        self._console, self._settings, self._plan, self._shape = console, settings, plan, shape
        self._steps = steps
        peak, adapts = settings.peak_tflops or _device_tflops(plan), settings.adapts
        self._health = Health(plan, shape, peak, steps, _device(), adapts)
        self.log = LogTail(settings.log, plan)
        self._told = CheckpointNews(settings.rank_logs / "workerlog.0")
        self._lines = 0  # of health that are due up to the last one that was shown

    def start(self, program: Sequence[str], timeout_s: float, nodes: Nodes, wait_s: float) -> None:
        """Start the ranks of this node and show how they do until they end. `program`: a module or a script, and its
        arguments. `wait_s`: for which ranks wait for one another. Raises GalvatronError: a rank failed, which it names.
        """
        from paddlenlp_galvatron.launch.processes import Launch, OutOfMemory

        settings = self._settings
        nproc = nodes.ranks_each(settings.world_size)
        logs = settings.rank_logs
        self._console.print(f"starting {nproc} processes, logs in {near(logs)}/workerlog.*", markup=False)
        if gpus.gpu_count() and (warning := gpus.few_cores(len(os.sched_getaffinity(0)), nproc)):
            self._console.print(f"warning: {warning}", markup=False)
        launch = Launch(
            program[0],
            program[1:],
            nproc,
            logs,
            timeout_s,
            nodes,
            forward_term=True,
            wait_s=wait_s,
            variables=gpus.all_kernels(self._plan.pipeline > 1, bool(self._shape.experts)),
        )
        try:
            with Progress(console=self._console, transient=True) as progress, launch, self._saved_on_interrupt():
                task = progress.add_task("training", total=self._steps)
                for _ in launch.wait():
                    if nodes.node_rank == 0:
                        self._show_told(progress)
                    if nodes.node_rank == 0 and self.log.read():
                        self._show(progress, task)
                if nodes.node_rank == 0:
                    self._show_told(progress)
        except OutOfMemory as error:
            self.log.read()
            report = out_of_memory_report(self._plan, list(self.log.latest), error.rank, error.peak_mib)
            self._console.print(report)
            raise
        self.log.read()

    @contextmanager
    def _saved_on_interrupt(self) -> Iterator[None]:
        """Ctrl-C ends a run that trains as SIGTERM does, with a checkpoint; a second one ends it at once."""

        def interrupt(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            if not self.log.begun:
                raise KeyboardInterrupt
            self._console.print("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
            signal.raise_signal(signal.SIGTERM)

        before = signal.getsignal(signal.SIGINT)
        for number in heeded(signal.SIGINT):
            signal.signal(number, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _show_told(self, progress: Progress) -> None:
        for line in self._told.read():
            progress.console.print(line, markup=False)

    def _show(self, progress: Progress, task: TaskID) -> None:
        last = self.log.latest[-1]
        progress.update(task, completed=last["step"] + 1, description=f"training, loss {last['loss']:.4f}")
        records = list(self.log.latest)
        due = (last["step"] + 1) // self._settings.logging_steps
        if due > self._lines:  # short steps come several at a time
            self._lines = due
            progress.console.print(self._health.line(records), markup=False)
        for warning in self._health.warnings(records, self.log.start):
            progress.console.print(f"warning: {warning}", markup=False)

    def summary(self) -> dict[str, Any]:
        """The outcome, for programs."""
        first, latest = self.log.first, list(self.log.latest)
        return {
            "steps": self.log.count,
            "first_loss": first["loss"] if first else None,
            "last_loss": latest[-1]["loss"] if latest else None,
            "tokens_per_s": median(record["tokens_per_s"] for record in latest) if latest else None,
            "plan": str(self._settings.plan),
            "log": str(self._settings.log),
            "output_dir": str(self._settings.output_dir),
        }

    def show_end(self) -> None:
        """Print the results: loss, speed, and traffic beside the prediction."""
        if self.log.first is None:
            self._console.print(self._settings.nothing_to_do(self._steps))
            return
        first, last = self.log.first, self.log.latest[-1]
        self._console.print(
            f"{self.log.count} steps: loss {first['loss']:.4f} -> {last['loss']:.4f}, median "
            f"{median(record['tokens_per_s'] for record in self.log.latest):,.0f} tokens/s, log in "
            f"{near(self._settings.log)}"
        )
        self._console.print(
            f"predictions calibrated from this run: galvatron calibrate {near(self._settings.log)} "
            f"--plans {near(self._settings.plan)} --model_size {self._settings.model} --device SHEET",
            markup=False,
            soft_wrap=True,
        )
        if self._settings.traced_steps and self._settings.traced.exists():
            self._console.print(f"time lines in {near(self._settings.traced)}; open it in https://ui.perfetto.dev")
        if self._plan.world_size > 1 and self._settings.preference is None:  # whose pairs' sums are not predicted
            adapters = self._settings.adapters("")
            traffic, rank = read_json(self._settings.traffic), adapters.rank if adapters else None
            self._console.print(traffic_table(self._plan, self._shape, traffic, rank))


def _device() -> str:
    """The kind of device of a rank, in a word."""
    return "GPU" if gpus.gpu_count() else "process"


def _device_tflops(plan: Plan) -> float | None:
    """The peak of this node's devices by the data sheet of their name, if there is one."""
    if not gpus.gpu_count():
        return None
    from paddlenlp_galvatron.profiles.data_sheet import data_sheet_of

    sheet = data_sheet_of(gpus.gpu_name())
    if sheet is None:
        return None
    fp32 = plan.assumed.mixed_precision is Precision.FP32
    return (sheet.matmul_fp32 if fp32 else sheet.matmul_16bit).value
