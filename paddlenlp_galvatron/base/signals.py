"""Signals that end a command, except those that its parent made it ignore."""

from __future__ import annotations

import signal


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those that this process does not ignore: nohup lets it ignore SIGHUP, and a script's & SIGINT."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
