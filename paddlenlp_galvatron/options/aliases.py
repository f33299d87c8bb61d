"""Names of options: Galvatron and its PaddleNLP port name the same things differently. One table for all commands."""

import difflib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TypeVar

from ..base.reading import read_json

T = TypeVar("T")

_DATA = read_json(Path(__file__).with_name("aliases.json"))


def _inverse(table: dict[str, list[str]]) -> dict[str, str]:
    return {other: ours for ours, others in table.items() for other in others}


ALIASES = _inverse(_DATA["aliases"])  # other name -> our name
# Name -> its meaning in a command that lacks the option but has these.
FALLBACKS: dict[str, list[str]] = _DATA["fallbacks"]
# Name of a value that a search chooses -> the option of `galvatron search` that limits it.
SEARCH_LIMITS = _inverse(_DATA["search_limits"])
SEARCHED = {"settle_bsz", "max_cp_deg"}  # options that commands have which search
MISNOMERS = _inverse(_DATA["misnomers"])  # word that is no name of an option -> option to suggest
SHAPE_FIELDS: dict[str, str] = _DATA["shape_fields"]  # our option -> field of config.json
VALUES: dict[str, dict[str, str]] = _DATA["values"]  # other name -> value under it -> the value by our name
TYPES = ("bf16", "fp16")  # of numbers, which others name by a switch each
MOST_LISTED = 20  # known names that an error lists
NEAR = 0.75  # similarity of two names, 0 to 1, below which one is no misspelling of the other: world_size, model_size
# If both are given, the second wins in any order: Megatron-LM's scheduler overrides the first.
OVERRIDDEN = {"adam_weight_decay": "weight_decay"}

# Names in Megatron-LM's scripts; our options with a different default there -> its name and default.
MEGATRON_NAMES = {"train_iters", "lr", "tensor_model_parallel_size", "pipeline_model_parallel_size", "lr_decay_style"}
MEGATRON_DEFAULTS: dict[str, tuple[str, str]] = _DATA["megatron_defaults"]


def other_defaults(names: Iterable[str], options: Container[str]) -> str:
    """A note on defaults that a script of Megatron-LM does not set; else ""."""
    if MEGATRON_NAMES.isdisjoint(names) or "lr_scheduler_type" not in options:
        return ""
    unset = [f"--{name} {to}" for ours, (name, to) in MEGATRON_DEFAULTS.items() if not ({ours, name} & {*names})]
    return f"Megatron-LM's defaults are others: {', '.join(unset)}; give them to be sure" if unset else ""


def canonical_name(name: str, options: Container[str] = ()) -> str:
    """Name of an option without dashes in front, with underscores, its alias resolved; `options`: a command's."""
    name = plain_name(name)
    name = ALIASES.get(name, name)
    meant = FALLBACKS.get(name, ())
    return meant[0] if meant and name not in options and all(each in options for each in meant) else name


def other_names(name: str, options: Container[str] = ()) -> list[str]:
    """Other names of an option in a command with these options."""
    opposite = {other for other, words in VALUES.items() if words.get("0") == "1"}
    others = (other for other in (*ALIASES, *FALLBACKS) if other not in options and other not in opposite)
    return [other for other in others if canonical_name(other, options) == name]


def canonical_value(name: str, value: T, options: Container[str] = ()) -> T | str:
    """A value given under any name of an option, converted to the canonical option's value."""
    plain = plain_name(name)
    words = {} if plain in TYPES and canonical_name(plain, options) == plain else VALUES.get(plain, {})
    text = str(value)
    return words.get(text, words.get(text.lower(), value))


def unknown(word: str, options: Iterable[str], prefix: str = "") -> str:
    """The fault of an option that a command lacks, and the remedy."""
    names = sorted(options)
    limit = SEARCH_LIMITS.get(plain_name(word)) or SEARCH_LIMITS.get(canonical_name(word, names))
    if limit and not SEARCHED.isdisjoint(names):
        where = f"{prefix}{limit}" if limit in names else f"{limit} of galvatron search"
        return f"the search chooses it; {where} limits it, and galvatron plan uniform writes a plan with it"
    return f"unknown option; {did_you_mean(word, names, prefix)}"


def did_you_mean(word: str, options: Iterable[str], prefix: str = "") -> str:
    """The remedy for a misspelt name: similar known names, including aliases."""
    names = sorted(options)
    aliases = [other for name in names for other in other_names(name, names)]
    plain = plain_name(word)
    option = MISNOMERS.get(plain) or MISNOMERS.get(canonical_name(plain, names))
    meant = [option] if option in (*names, *aliases) else []
    near = difflib.get_close_matches(plain, [*names, *aliases], n=1, cutoff=NEAR)
    if close := dict.fromkeys([*meant, *near]):
        return f"did you mean {' or '.join(prefix + name for name in close)}?"
    if (prefix and names) or len(names) > MOST_LISTED:
        return "--help lists all"
    return "known: " + ", ".join(prefix + name for name in names)


def plain_name(name: str) -> str:
    """Name of an option without dashes in front, with underscores."""
    return name.lstrip("-").replace("-", "_")
