"""Folders of others: links out of them and in circles, pipes, names that nobody can mean."""

from __future__ import annotations

from random import Random

from . import data
from .case import VICTIM, Case
from .grammar import dump

NAMES = ["a", "b.txt", "c.md", "d.jsonl", "e.json", "\x1b[2J.txt", "\u202egpj.txt", "n" * 200 + ".txt", " ", "-x.txt"]
PLACES = ["", "deep/", "deep/er/", ".hidden/", "logs.txt/"]
TARGETS = [f"../../{VICTIM}", f"../{VICTIM}", "/", "/proc/self/mem", "/dev/zero", ".", "..", "missing", "b.txt", ""]


def text_folder(random: Random) -> Case:
    """Text that is prepared."""
    files = {f"in/{_name(random)}": data.json_lines(random) for _ in range(random.randint(0, 4))}
    links = {f"in/{_name(random)}": random.choice(TARGETS) for _ in range(random.randint(0, 4))}
    words = ("data", "prepare", "in", "--tokenizer", "tokenizer.json", "--output", "out/x")
    return _case(words, {**files, "tokenizer.json": data.tokenizer()}, links, ("out/x.bin", "out/x.idx"))


def run_folder(random: Random) -> Case:
    """A run's folder that another run is to continue in, or that a plan, a model and a log are read of."""
    own = ("train_log.jsonl", ".lock", "log/workerlog.0", "settings.0.json", "checkpoints/step-00000001/index.json")
    links = {f"o/{name}": random.choice(TARGETS) for name in own if random.random() < 0.4}
    links |= {name: random.choice(TARGETS) for name in ("plan.json", "model.json") if random.random() < 0.2}
    files = {"plan.json": dump(data.PLAN).encode(), "model.json": dump(data.MODEL).encode()}
    kept = {name: content for name, content in files.items() if name not in links}
    train = ("train", "plan.json", "--model=model.json", "--output_dir=o", "--max_steps=1", "--dry_run")
    words = random.choice([train, ("report", "plan.json", "--log=o/train_log.jsonl"), ("plan", "show", "plan.json")])
    return _case(words, kept, links, ("report.html",))


def _name(random: Random) -> str:
    return random.choice(PLACES) + random.choice(NAMES)


def _case(words: tuple[str, ...], files: dict[str, bytes], links: dict[str, str], writes: tuple[str, ...]) -> Case:
    """Without a link in place of a file or of a folder."""
    taken = {name for file in files for name in (file, *(file[:at] for at, char in enumerate(file) if char == "/"))}
    beside = {name: to for name, to in links.items() if name not in taken}
    folders = {name[:at] for name in (*files, *beside) for at, char in enumerate(name) if char == "/"}
    return Case(words, files, writes, links={name: to for name, to in beside.items() if name not in folders})
