"""The `galvatron` command: finds the file of the requested command, runs it, and turns errors into one line.

Nothing heavy is imported here, so `galvatron --version` is fast and planning never imports Paddle.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paddlenlp_galvatron.base import GalvatronError, UserError, printable, read_json, shortened
from paddlenlp_galvatron.base.process import INTERRUPTED, heeded, lasting_streams
from paddlenlp_galvatron.version import __version__

if TYPE_CHECKING:
    from .command import App, Command

# A command is a file of this folder (- is _ there) that holds `app`, a `command.App`, and a line of commands.json.
COMMANDS: dict[str, str] = read_json(Path(__file__).with_name("commands.json"))

SHOWN, LONGEST = 50, 2000  # faults, and characters of one: a broken file may have thousands


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (`EXIT_CODES`)."""
    words = list(sys.argv[1:] if args is None else args)
    return exit_code_of(lambda: _run([word for word in words if word != "--debug"]), debug="--debug" in words)


def exit_code_of(work: Callable[[], int], debug: bool = False) -> int:
    """Do the work; turn an error into a line and an exit code."""
    debug = debug or os.environ.get("GALVATRON_DEBUG", "0") not in ("", "0")
    if not debug:
        warnings.simplefilter("ignore")  # warnings of Paddle and PaddleNLP, which users cannot fix
    _show_what_cannot_be_encoded()
    with lasting_streams() as lost:
        code = _done(work, debug)
        if code == 0 and (error := lost()):
            _print([f"the output cannot be written: {error.strerror}"])
            return GalvatronError.exit_code
        return code


def _done(work: Callable[[], int], debug: bool) -> int:
    interrupts: list[int] = []
    try:
        with _noted(interrupts), _unwound_at_the_end():
            return work()
    except GalvatronError as error:
        _print(str(error).split("\n"))
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return _interrupted(str(interrupt))
    except Exception as error:
        if interrupts:  # during an import, which turned it into another error
            return _interrupted()
        if debug:
            raise
        _print([_sentence(error)])
        return UserError.exit_code if _is_about_a_file(error) else GalvatronError.exit_code


@contextmanager
def _unwound_at_the_end() -> Iterator[None]:
    """SIGTERM and a closed terminal end the command like an error, removing its temporary files."""
    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [
            signal_number
            for signal_number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(signal_number) is signal.SIG_DFL
        ]
    for number in taken:
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # exit code of shells
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _run(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name == "--version":
        print(f"galvatron {__version__}")
        return 0
    if name in ("--help", "-h", "help"):
        print(_help())
        return 0
    if name.replace("-", "_") in COMMANDS:
        name = name.replace("-", "_")
    if name not in COMMANDS:
        from paddlenlp_galvatron.options.aliases import did_you_mean  # imported here: only a mistake needs it

        kind = "option" if name.startswith("-") else "command"
        raise UserError(f"{name}: unknown {kind}; {did_you_mean(name, [*COMMANDS, '--version', '--help'])}")
    app = import_module(f".{name.replace('-', '_')}", __package__).app
    return run(app, words[1:], f"galvatron {name}")


def run(app: App, words: Sequence[str], path: str) -> int:
    """Run the command that is named by the words after `path` (such as `galvatron plan`), or show its help. Returns the
    exit code. Raises GalvatronError."""
    from .command import HELP

    command, rest, path = app.find(words, path)
    if command and not HELP & set(rest):
        return command.run(rest, path)
    from .help import of_command, of_group  # imported here: few commands show it

    print(of_command(command, path) if command else of_group(app, path))
    return 0


def commands() -> dict[str, Command]:
    """Every command by its full name, such as `plan show`."""
    apps = {name: import_module(f".{name.replace('-', '_')}", __package__).app for name in COMMANDS}
    return {f"{name} {sub}".strip(): command for name, app in apps.items() for sub, command in app.commands.items()}


@contextmanager
def _noted(interrupts: list[int]) -> Iterator[None]:
    """Meanwhile record each Ctrl-C as well as raise it, since other code may catch the exception."""

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    ours = threading.current_thread() is threading.main_thread() and bool(heeded(signal.SIGINT))
    handler = signal.signal(signal.SIGINT, note) if ours else None
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)


def _interrupted(why: str = "") -> int:
    print(f"interrupted: {why}" if why else "interrupted", file=sys.stderr)
    return INTERRUPTED


def _print(faults: list[str]) -> None:
    """Print one line a fault, also if a name in it has line breaks."""
    more = [f"and {len(faults) - SHOWN} faults more"] if len(faults) > SHOWN else []
    for fault in [*faults[:SHOWN], *more]:
        print(f"error: {shortened(printable(fault), LONGEST)}", file=sys.stderr)


def _show_what_cannot_be_encoded() -> None:
    """Print escapes, instead of failing, for characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _is_about_a_file(error: Exception) -> bool:
    return isinstance(error, OSError) and isinstance(error.filename, str | os.PathLike)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and _is_about_a_file(error):
        return f"{error.filename}: cannot be read or written: {error.strerror}"
    if isinstance(error, MemoryError) or "failed to map segment" in str(error):
        return f"memory ran out: {error or type(error).__name__}; free some, or raise the limit (ulimit -v)"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is not installed, and this command needs it; docs/en/installation.md says how"
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"unexpected {what}; --debug shows where, and a report is welcome"


def _help() -> str:
    from .command import EXIT_CODES

    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: galvatron COMMAND [OPTIONS]\n\n"
        "Finds and runs the fastest parallel strategy for training a transformer with PaddleNLP, layer by layer.\n\n"
        f"commands (galvatron COMMAND --help says more):\n{commands}\n\n"
        "options:\n  --version  print the version\n  --debug    show the traceback of an unexpected error\n\n"
        f"{EXIT_CODES}"
    )


if __name__ == "__main__":
    sys.exit(main())
