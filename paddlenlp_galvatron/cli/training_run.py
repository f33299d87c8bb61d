"""Starts the ranks of a training run on this node, reports its progress, and runs the user's command for events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, TaskID

from paddlenlp_galvatron.base import count, near, processor
from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.process import heeded
from paddlenlp_galvatron.base.reading import NewLines, read_json
from paddlenlp_galvatron.base.writing import reason_of
from paddlenlp_galvatron.launch import gpus
from paddlenlp_galvatron.launch.nodes import Nodes
from paddlenlp_galvatron.plan import ModelShape, Plan
from paddlenlp_galvatron.report.measured import Health, of_plan, out_of_memory_report, traffic_table
from paddlenlp_galvatron.training import step_log
from paddlenlp_galvatron.training.step_log import NEWS, RUN, STOPPED, Event, StepRecord, event_of, record_of

if TYPE_CHECKING:
    from paddlenlp_galvatron.training.settings import TrainSettings

KEPT = 64  # latest records of the log, for the health lines
WARNING = "warning: "
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # a run saves and ends on these signals


class LogTail:
    """The end of a log, read as it grows. A run starts a new log file that begins with the kept lines; a log with the
    old inode belongs to an earlier run and is ignored. The run may have begun under another plan."""

    def __init__(self, path: Path, plan: Plan):
        self._path, self._plan, self._lines = path, plan, NewLines(path)
        self._before = path.stat().st_ino if path.exists() else None
        self.count = 0
        self.speeds = array("d")  # tokens/s of every step of this plan
        self.first: StepRecord | None = None
        self.latest: deque[StepRecord] = deque(maxlen=KEPT)  # steps by this plan
        self.start = 0  # the first step of this run, or one close to it
        self.run: str | None = None  # its id, as its launcher gave it or the log says
        self.events: list[Event] = []  # of this run, without those that the launcher added
        self.seen: list[Event] = []

    @property
    def begun(self) -> bool:
        """Whether the run has written records."""
        with suppress(FileNotFoundError):
            now = self._path.stat()
            return now.st_ino != self._before and now.st_size > 0
        return False

    def read(self) -> bool:
        """Read new records; returns whether there are any of this plan."""
        if not self.begun:
            return False
        lines = self._lines.read()
        records = [record for line in lines if (record := record_of(line))]
        if records and not self.count:
            self.first, self.start = records[0], records[-1]["step"]
            self.run = self.run or records[-1].get("run")
        for event in filter(None, map(event_of, lines)):
            if event.get("run") == self.run and event not in self.seen:
                self.events.append(event)
                self.seen.append(event)
        self.count += len(records)
        self.latest.extend(new := of_plan(self._plan, records))
        self.speeds.extend(record["tokens_per_s"] for record in new)
        return bool(new)


class RankNews:
    """New lines on checkpoints, evaluations and the end in a rank's growing log."""

    def __init__(self, path: Path):
        self._lines = NewLines(path)

    def read(self) -> list[str]:
        texts = [line.decode(errors="replace").rstrip("\n") for line in self._lines.read()]
        return [text for text in texts if text.startswith(NEWS)]


class TrainingRun:
    """One run, from its start to its end."""

    def __init__(
        self,
        console: Console,
        settings: TrainSettings,
        plan: Plan,
        shape: ModelShape,
        steps: int,
        on_event: str | None = None,
    ):
        """`on_event`: the user's command for events."""
        self._hook = EventHook(on_event, settings.rank_logs / "on_event.log", console)
        self._unwritten: list[Event] = []  # kept until the log begins
        self._console, self._settings, self._plan, self._shape = console, settings, plan, shape
        self._steps = steps
        self._health = Health(plan, mfu_of(plan, shape, settings), steps, "GPU" if gpus.gpu_count() else "process")
        self.log = LogTail(settings.log, plan)
        self._news: RankNews
        self._signals: list[int] = []  # received signals, which stop the run
        self._stopped = False
        self._lines = 0  # health lines due at the last one shown

    def start(self, program: Sequence[str], timeout_s: float, nodes: Nodes, wait_s: float) -> None:
        """Start the ranks of this node and show their progress until they end. `program`: a module or a script, and its
        arguments. `wait_s`: timeout of ranks that wait for each other. Raises GalvatronError that names a failed rank.
        """
        from paddlenlp_galvatron.launch.processes import Launch, LaunchError, OutOfMemory, World

        settings = self._settings
        nproc = nodes.ranks_each(settings.world_size)
        logs = settings.rank_logs
        self._news = RankNews(logs / f"workerlog.{nproc * nodes.node_rank}")
        self._console.print(f"starting {count(nproc, 'process', 'processes')}, logs in {near(logs)}/workerlog.*")
        if gpus.gpu_count() and (warning := gpus.few_cores(processor.cores(), nproc)):
            self._console.print(f"warning: {warning}")
        leads = nodes.node_rank == 0
        self.log.run = step_log.new_run() if leads else None
        world = World(nproc, nodes, wait_s=wait_s, variables={RUN: self.log.run} if self.log.run else {})
        launch = Launch(program[0], program[1:], world, logs, timeout_s, forward_term=True)
        try:
            with Progress(console=self._console, transient=True) as progress, launch, self._saved_on_interrupt():
                task = progress.add_task("training", total=self._steps)
                for _ in launch.wait():
                    self._follow(progress, task, leads)
                self._follow(progress, task, leads)
        except OutOfMemory as error:
            self.log.read()
            report = out_of_memory_report(self._plan, list(self.log.latest), error.rank, error.peak_mib)
            self._console.print(report)
            self._announce("failed", str(error), leads)
            raise
        except LaunchError as error:
            if not self._signals or self.log.begun:
                self._announce("failed", str(error), leads)
                raise
            self._stopped = True  # the ranks were ended before their first step
        finally:
            self._write_events()
            self._hook.close()
        self.log.read()

    @property
    def exit_code(self) -> int:
        """0: all steps are done. Else 128 + the number of the signal that stopped the run, as in shells; SIGTERM if
        only another node or a rank received it."""
        return 128 + next(iter(self._signals), signal.SIGTERM) if self._stopped else 0

    @contextmanager
    def _saved_on_interrupt(self) -> Iterator[None]:
        """Ctrl-C ends a training run like SIGTERM, with a checkpoint; a second Ctrl-C ends it at once. Records the
        signals."""

        def interrupt(number: int, _: object) -> None:
            signal.signal(signal.SIGINT, handlers[signal.SIGINT])
            if not self.log.begun:
                raise KeyboardInterrupt
            self._signals.append(number)
            self._console.print("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
            signal.raise_signal(signal.SIGTERM)

        def forward(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)
            handlers[number](number, frame)

        handlers: dict[int, Any] = {each: signal.getsignal(each) for each in STOPPING}
        for each in heeded(*STOPPING):
            signal.signal(each, interrupt if each == signal.SIGINT else forward)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _follow(self, progress: Progress, task: TaskID, leads: bool) -> None:
        """Show the run's progress: on node 0 (`leads`) from its first rank's log, on other nodes from the events."""
        for line in self._news.read():
            self._stopped |= line.startswith(STOPPED)
            if leads:
                progress.console.print(line)
                if line.startswith(WARNING):
                    self._announce("warning", line, leads)
        if self.log.read():
            self._show(progress, task, leads)
        while self.log.events:
            event = self.log.events.pop(0)
            if leads:
                self._hook.start(event)
            else:
                progress.console.print(event["text"])
        if self.log.begun:
            self._write_events()

    def _announce(self, event: str, text: str, leads: bool) -> None:
        """Add an event of the launcher, only on node 0."""
        if leads:
            made = step_log.new_event(self.log.run, event, text)
            self.log.seen.append(made)
            self._unwritten.append(made)
            self._hook.start(made)

    def _write_events(self) -> None:
        try:
            while self._unwritten:
                step_log.append_event(self._settings.log, self._unwritten.pop(0))
        except OSError as error:
            self._console.print(f"warning: {self._settings.log}: an event cannot be written: {reason_of(error)}")

    def _show(self, progress: Progress, task: TaskID, leads: bool) -> None:
        last = self.log.latest[-1]
        progress.update(task, completed=last["step"], description=f"training, loss {last['loss']:.4f}")
        records = list(self.log.latest)
        due = last["step"] // self._settings.logging_steps
        if due > self._lines:  # short steps come several at a time
            self._lines = due
            progress.console.print(self._health.line(records))
        for warning in self._health.warnings(records, self.log.start) if leads else ():
            progress.console.print(f"{WARNING}{warning}")
            self._announce("warning", f"{WARNING}{warning}", leads)

    def summary(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        first, latest = self.log.first, list(self.log.latest)
        return {
            "steps": self.log.count,
            "max_steps": self._steps,
            "stopped": self._stopped,
            "first_loss": first["loss"] if first else None,
            "last_loss": latest[-1]["loss"] if latest else None,
            "tokens_per_s": median(self.log.speeds) if latest else None,
            "plan": str(self._settings.plan),
            "log": str(self._settings.log),
            "output_dir": str(self._settings.output_dir),
        }

    def show_end(self) -> None:
        """Print the results: steps, loss, speed, and traffic next to the prediction."""
        if self.log.first is None and self._stopped:
            self._console.print(f"stopped before a step of {self._steps}; {self._settings.how_to_resume}")
            return
        if self.log.first is None:
            self._console.print(self._settings.nothing_to_do(self._steps))
            return
        first, last = self.log.first, self.log.latest[-1]
        results = (
            f"loss {first['loss']:.4f} -> {last['loss']:.4f}, median {median(self.log.speeds):,.0f} tokens/s, log in "
            f"{near(self._settings.log)}"
        )
        if self._stopped:
            self._console.print(
                f"{results}\nstopped at step {last['step']} of {self._steps}; {self._settings.how_to_resume}"
            )
            return
        self._console.print(f"{self.log.count} steps: {results}")
        self._console.print(
            f"to calibrate predictions with this run: galvatron calibrate {near(self._settings.log)} "
            f"--plans {near(self._settings.plan)} --model_size {self._settings.model} --device SHEET",
            soft_wrap=True,
        )
        if self._settings.traced_steps and self._settings.traced.exists():
            self._console.print(f"time lines in {near(self._settings.traced)}; open it in https://ui.perfetto.dev")
        if self._plan.world_size > 1 and self._settings.preference is None:  # DPO's sums over pairs are not predicted
            adapters = self._settings.adapters("")
            traffic, rank = read_json(self._settings.traffic), adapters.rank if adapters else None
            self._console.print(traffic_table(self._plan, self._shape, traffic, rank))


def mfu_of(plan: Plan, shape: ModelShape, settings: TrainSettings) -> Callable[[float], float | None]:
    """MFU from tokens/s, for the trained weights and the document lengths that the plan was searched for. The peak is
    that of this node's GPUs by the driver's full name, else of the device that the plan was searched for."""
    if not (settings.peak_tflops or gpus.gpu_count()):
        return lambda tokens_per_s: None
    from paddlenlp_galvatron.profiles.data_sheet import Device

    if peak := settings.peak_tflops:
        device = Device(peak_16bit_tflops=peak, peak_fp32_tflops=peak)
    else:
        here = Device.named(gpus.gpu_name())
        device = here if here.peak_16bit_tflops else Device.searched(plan)
    options = (plan.metadata.get("searched_from") or {}).get("options")
    tokens = options.get("document_tokens") if isinstance(options, dict) else None
    documents = tokens if isinstance(tokens, int | float) else None
    return partial(device.mfu, plan=plan, shape=shape, frozen=settings.adapts, document_tokens=documents)


HOOK_S = 30.0  # a command is killed after this time


class EventHook:
    """A shell command for each event, which is JSON on its stdin. It runs during the run, for at most HOOK_S; a command
    that fails is a warning."""

    def __init__(self, command: str | None, log: Path, console: Console):
        """`command`: None: no command. `log`: the file for its output."""
        self._command, self._log, self._console = command, log, console
        self._threads: list[Thread] = []  # a thread for each event

    def start(self, event: dict[str, Any]) -> None:
        """Start the command for an event."""
        if self._command is not None:
            self._threads.append(Thread(target=self._run, args=(self._command, event)))
            self._threads[-1].start()

    def close(self) -> None:
        """Wait for the running commands."""
        for thread in self._threads:
            thread.join()

    def _run(self, command: str, event: dict[str, Any]) -> None:
        how = ""
        try:
            with self._log.open("ab") as output:
                process = subprocess.Popen(
                    command, shell=True, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
                )
            process.communicate(json.dumps(event).encode() + b"\n", timeout=HOOK_S)
            if process.returncode:
                how = f"exit code {process.returncode}"
        except OSError as error:
            how = f"cannot be started: {error.strerror}"
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            how = f"was ended, as it took more than {HOOK_S:.0f} s"
        if how:
            where = f"for the event {event['event']}: {how}; its output: {near(self._log)}"
            self._console.print(f"warning: on_event: {where}")
