"""Options of other programs without effect here: the accepted values, and why others are refused.

Other programs' scripts run unchanged. An option that names our fixed behaviour is accepted, one that only changes the
way to the same numbers is accepted with a note, and one that asks for an absent feature is refused with the reason.

foreign.json has a table per program. Its rows: reason, values and names; `switches` may appear without a value. An
option that two programs share with one meaning is in the first one's table. An option with two meanings is in no table:
it is an option of the command, which honours only its own meaning (`recompute_granularity`).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..base.reading import read_json


class Fate(NamedTuple):
    """The treatment of an option."""

    why: str  # reason for no effect, or for no other value
    values: str | None = None  # accepted values, separated by |; None: any value
    holds: bool = True  # these values describe every run; False: the plan or model decides, so a note follows


Fates = dict[str, Fate]

_DATA = read_json(Path(__file__).with_name("foreign.json"))
# Numbers of a model that Megatron-LM's scripts give -> field of ModelShape, or of its latents; training compares both.
MODEL_FIELDS: dict[str, str] = _DATA["model_fields"]


def _names(row: Mapping[str, Any]) -> list[str]:
    return [*row.get("switches", ()), *row.get("options", ())]


def _fates(rows: Iterable[Mapping[str, Any]]) -> Fates:
    return {name: Fate(row["why"], row.get("values"), row.get("holds", True)) for row in rows for name in _names(row)}


PROGRAMS: dict[str, Fates] = {program: _fates(rows) for program, rows in _DATA["programs"].items()}
PROGRAMS["Megatron-LM"] |= dict.fromkeys(MODEL_FIELDS, Fate("the model's config.json says it"))
ELSEWHERE = _fates(_DATA["training"])  # options of training, which other commands accept and ignore
FOREIGN: Fates = {name: fate for table in PROGRAMS.values() for name, fate in table.items()}
# Options that need no value, and options with several words.
_ROWS = [row for rows in (*_DATA["programs"].values(), _DATA["training"]) for row in rows]
SWITCHES = {name for row in _ROWS for name in row.get("switches", ())}
SEVERAL = {name for name in FOREIGN if name.endswith("_config") or name.startswith("amp_custom")} | {
    "envs",
    "rampup_batch_size",
}
# Program -> keys that its files alone have, at the top or in a section.
FILES: dict[str, list[str]] = _DATA["files"]


def program_of(names: Iterable[str]) -> str:
    """The program whose file has these names, by two of its keys, or by an unmistakable one; empty: no known one."""
    written = set(names)
    held = {program: len(written.intersection(keys)) for program, keys in FILES.items()}
    best = max(held, key=lambda program: held[program])
    return best if held[best] > 1 or written & {"finetuning_type", "zero_optimization", "compute_environment"} else ""


class Outcome(NamedTuple):
    """The outcome for an option without effect here; both are empty for a value that applies anyway."""

    fault: str = ""  # why its value is refused
    idle: str = ""  # why it has no effect


def outcome_of(name: str, value: object, shared: Mapping[str, Fate] = {}) -> Outcome | None:
    """The outcome of an option by canonical name; None: it is no such option. `shared`: further options of one
    command."""
    fate = shared.get(name) or FOREIGN.get(name) or ELSEWHERE.get(name)
    if fate is None:
        return None
    if fate.values is None:
        return Outcome(idle=fate.why)
    if value in (None, "None"):
        return Outcome()
    if any(same(str(value), accepted) for accepted in fate.values.split("|")):
        return Outcome() if fate.holds else Outcome(idle=fate.why)
    return Outcome(fault=fate.why)


def idle_note(idle: Mapping[str, str]) -> str:
    """One line that names options without an effect, by reason; `idle`: option -> reason."""
    by_reason: dict[str, list[str]] = {}
    for name_written, reason in idle.items():
        by_reason.setdefault(reason, []).append(name_written)
    return "no effect here: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())


def same(value: str, other: str) -> bool:
    """Whether two values are equal: numbers by value, booleans in any spelling, words in any case."""
    words = {"false": "0", "true": "1", "": "0"} if other in ("0", "1") else {}
    value = words.get(value.lower(), value.lower())
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other.lower()
