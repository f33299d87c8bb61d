"""Runs the user's command for events of a run, such as one that sends an alert."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.text import near

HOOK_S = 30.0  # after which a command is ended
POLL_S = 0.05


class EventHook:
    """A shell command for each event, which is JSON on its stdin. It runs during the run, for at most HOOK_S; a command
    that fails is a warning."""

    def __init__(self, command: str | None, log: Path, console: Console):
        """`command`: None: none is wanted. `log`: the file for its output."""
        self._command, self._log, self._console = command, log, console
        self._running: list[tuple[str, subprocess.Popen[bytes], float]] = []  # event, process, and when it must end

    def start(self, event: dict[str, Any]) -> None:
        """Start the command for an event."""
        if self._command is None:
            return
        try:
            with TemporaryFile() as given, self._log.open("ab") as output:
                given.write(json.dumps(event).encode() + b"\n")
                given.seek(0)
                process = subprocess.Popen(
                    self._command, shell=True, stdin=given, stdout=output, stderr=output, start_new_session=True
                )
        except OSError as error:
            self._warn(event["event"], f"cannot be started: {error.strerror}")
            return
        self._running.append((event["event"], process, time.monotonic() + HOOK_S))

    def look(self) -> None:
        """Warn of commands that failed, and end those that take too long."""
        for each in [*self._running]:
            event, process, deadline = each
            if process.poll() is None and time.monotonic() < deadline:
                continue
            self._running.remove(each)
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._warn(event, f"was ended, as it took more than {HOOK_S:.0f} s")
            elif process.returncode:
                self._warn(event, f"exit code {process.returncode}")

    def close(self) -> None:
        """Wait for the commands that run."""
        while self._running:
            self.look()
            time.sleep(POLL_S)

    def _warn(self, event: str, how: str) -> None:
        self._console.print(f"warning: on_event: for the event {event}: {how}; its output: {near(self._log)}")
