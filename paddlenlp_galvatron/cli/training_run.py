"""Starts the ranks of a training run on this node, and tells from its log how it does."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress, TaskID

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.reading import read_json
from paddlenlp_galvatron.base.text import near
from paddlenlp_galvatron.launch.nccl import variables_of
from paddlenlp_galvatron.launch.nodes import ONE_NODE, Nodes
from paddlenlp_galvatron.plan import ModelShape, Plan, Precision
from paddlenlp_galvatron.profiles.data_sheet import data_sheet_of
from paddlenlp_galvatron.report import Health, out_of_memory_report
from paddlenlp_galvatron.report.traffic import traffic_table
from paddlenlp_galvatron.training.step_log import StepRecord, record_of

if TYPE_CHECKING:
    from paddlenlp_galvatron.training.settings import TrainSettings

KEPT = 64  # latest records of the log, of which health is told
TOLD = ("goes on at ", "writing ", "saved ", "warning: ")  # how rank 0 begins what it says of checkpoints


class NewLines:
    """Lines of a file that grows, each told once; one that is being written waits."""

    def __init__(self, path: Path):
        self._path, self._position = path, 0

    def read(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            lines = [line for line in file.readlines() if line.endswith(b"\n")]
        self._position += sum(map(len, lines))
        return lines


class LogTail:
    """The end of a log, read as it grows. A run begins by writing its log anew, with the lines that it goes on behind:
    one that lies there from before is no news."""

    def __init__(self, path: Path):
        self._path, self._lines = path, NewLines(path)
        self._before = path.stat().st_ino if path.exists() else None
        self.count = 0
        self.first: StepRecord | None = None
        self.latest: deque[StepRecord] = deque(maxlen=KEPT)
        self.start = 0  # the first step of this run, or one close to it

    @property
    def begun(self) -> bool:
        """Whether the run has written records, taken in or not."""
        with suppress(FileNotFoundError):
            now = self._path.stat()
            return now.st_ino != self._before and now.st_size > 0
        return False

    def read(self) -> bool:
        """Take in new records, and say whether there are any."""
        if not self.begun:
            return False
        records = [record for line in self._lines.read() if (record := record_of(line))]
        if records and not self.count:
            self.first, self.start = records[0], records[-1]["step"]
        self.count += len(records)
        self.latest.extend(records)
        return bool(records)


class CheckpointNews:
    """What a rank says of checkpoints in its log, as it grows."""

    def __init__(self, path: Path):
        self._lines = NewLines(path)

    def read(self) -> list[str]:
        texts = [line.decode(errors="replace").rstrip("\n") for line in self._lines.read()]
        return [text for text in texts if text.startswith(TOLD)]


class TrainingRun:
    """One run, from its start to its end."""

    def __init__(self, console: Console, settings: TrainSettings, plan: Plan, shape: ModelShape):
        self._console, self._settings, self._plan, self._shape = console, settings, plan, shape
        self._health = Health(plan, shape, settings.peak_tflops or _device_tflops(plan))
        self.log = LogTail(settings.log)
        self._told = CheckpointNews(settings.output_dir / "log" / "workerlog.0")
        self._lines = 0  # of health that are due up to the last one that was shown

    def start(self, program: Sequence[str], timeout_s: float, nodes: Nodes = ONE_NODE) -> None:
        """Start the ranks of this node and show how they do until they end. `program`: a module or a script, and its
        arguments. Raises GalvatronError that names the rank that failed."""
        from paddlenlp_galvatron.launch.processes import Launch, OutOfMemory

        settings = self._settings
        nproc = nodes.ranks_each(settings.world_size)
        logs = settings.output_dir / "log"
        self._console.print(f"starting {nproc} processes; what they say: {near(logs)}/workerlog.*", markup=False)
        variables = variables_of(self._plan)
        launch = Launch(program[0], program[1:], nproc, logs, timeout_s, nodes, True, variables=variables)
        try:
            with Progress(console=self._console, transient=True) as progress, launch, self._saved_on_interrupt():
                task = progress.add_task("training", total=None if settings.max_steps < 0 else settings.max_steps)
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

        before = signal.signal(signal.SIGINT, interrupt)
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

    def show_end(self) -> None:
        """What came of it: loss and speed, and its traffic beside the prediction."""
        if self.log.first is None:
            self._console.print(f"nothing to do: the checkpoints in {self._settings.checkpoints} have all the steps")
            return
        first, last = self.log.first, self.log.latest[-1]
        self._console.print(
            f"{self.log.count} steps: loss {first['loss']:.4f} -> {last['loss']:.4f}, "
            f"{last['tokens_per_s']:.0f} tokens/s, log in {near(self._settings.log)}"
        )
        self._console.print(
            f"predictions calibrated from this run: galvatron calibrate {near(self._settings.log)} "
            f"--plans {near(self._settings.plan)} --model_size {self._settings.model} --device SHEET",
            markup=False,
            soft_wrap=True,
        )
        if self._settings.traced_steps and self._settings.traced.exists():
            self._console.print(f"time lines in {near(self._settings.traced)}; open it in https://ui.perfetto.dev")
        if self._plan.world_size > 1:
            traffic = read_json(self._settings.traffic)
            self._console.print(traffic_table(self._plan, self._shape, traffic))


def _device_tflops(plan: Plan) -> float | None:
    """The peak of this node's devices by the data sheet of their name, if there is one."""
    from paddlenlp_galvatron.launch import gpus

    sheet = data_sheet_of(gpus.gpu_name()) if gpus.gpu_count() else None
    if sheet is None:
        return None
    fp32 = plan.assumed.mixed_precision is Precision.FP32
    return (sheet.matmul_fp32 if fp32 else sheet.matmul_16bit).value
