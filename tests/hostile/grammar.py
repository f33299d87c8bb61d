"""A grammar of JSON that is nearly right: a sound value, some of whose parts are replaced, and its text damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

from . import data

ESCAPES = "\x1b]0;title\x07\x1b[2J"


class Raw(str):
    """Text that stands in a JSON file as it is."""


NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 8, 64, 4096, 65_536, 65_537, 10**6, 10**7, 2**31 - 1, 2**31, 2**32, 2**63, 10**14, 10**19),
    *(10**39, 10**400, 0.5, -0.5, 1e-320, 1e-9, 1e15, 1e300, 1.0, 2.5),
    *map(Raw, ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "1" + "0" * 100_000, "-0", "0" * 9]),
]
TEXTS: list[Any] = [
    *("", " ", "a", "0", "1", "-1", "1,2", "1,", ",", "1,,2", "nan", "inf", "None", "null", "true", "é", "中文", "{}"),
    *("x" * 300, "x" * 5000, ESCAPES, "\u202eabc", "a\nb\r\nerror: c", "[bold red]x[/]", "[/nothing]", ":smile:"),
    *("%s%n", "$(touch X)", "../../etc/passwd", "/dev/zero", "/dev/stdin", "/", "~", "." * 256, "/".join(["x"] * 3000)),
    *("\0", "\ufeff", *map(Raw, ['"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"' + "\\u001b" * 1000 + '"'])),
]
OTHERS: list[Any] = [*(None, True, False, [], {}, [[]], [1], ["1"], [None]), {"a": 1}, {"": {}}]
OTHERS.append({"a": {"b": [1, {"c": 2}]}})
BULKY: list[Callable[[], Any]] = [
    lambda: Raw("[" * 100_000),
    lambda: Raw('{"a":' * 100_000),
    lambda: Raw("[" * 60 + "1" + "]" * 60),
    lambda: Raw("[" * 1000 + "]" * 1000),
    lambda: [0] * 300_000,
    lambda: [[]] * 200_000,
    lambda: {str(number): number for number in range(60_000)},
    lambda: Raw("{" + '"a":1,' * 100_000 + '"a":2}'),
    lambda: "1," * 400_000 + "1",
    lambda: ",".join(["8"] * 10_000),
    lambda: ",".join(["0"] * 9_000),
    lambda: ",".join(str(number) for number in range(1, 9_000)),
    lambda: "x" * 1_000_000,
    lambda: " " * 1_000_000,
    lambda: "1" * 900_000,
]


def hostile_value(random: Random) -> Any:
    kind = random.random()
    if kind < 0.04:
        return random.choice(BULKY)()
    return deepcopy(random.choice(NUMBERS if kind < 0.45 else TEXTS if kind < 0.8 else OTHERS))  # it may be mutated


def mutated(value: Any, random: Random) -> Any:
    """The value with none to four of its parts replaced, left out, doubled, moved or renamed."""
    value = deepcopy(value)
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 4))):
        places = list(_places(value))
        if not places:
            return hostile_value(random)
        inside, key = random.choice(places)
        action = random.random()
        if action < 0.65:
            inside[key] = hostile_value(random)
        elif action < 0.8:
            del inside[key]
        elif isinstance(inside, dict) and action < 0.9:
            name = random.choice([*inside, *(text for text in TEXTS if not isinstance(text, Raw))])
            inside[name] = inside.pop(key)
        else:
            other, source = random.choice(places)
            inside[key] = deepcopy(other[source]) if isinstance(other, dict) and source in other else [inside[key]]
    return value if random.random() > 0.01 else hostile_value(random)


def damaged(text: bytes, random: Random) -> bytes:
    """The text, mostly as it is, else in another encoding, something else, or as a disk or a copy leaves it."""
    kind = random.random()
    if kind < 0.75:
        return text
    if kind < 0.9:
        return data.damaged(random, text)
    if kind < 0.95:
        return text.decode(errors="replace").encode(random.choice(("utf-8-sig", "utf-16", "utf-32")))
    return random.choice((b"", b"\n", b"null", b"[]", b"{", b"}", b"1", b'""', b"\xff\xfe", b"\0" * 1000, text + text))


def json_file(value: Any, random: Random) -> bytes:
    """A file of a value, mutated and damaged."""
    return damaged(dump(mutated(value, random)).encode(errors="surrogatepass"), random)


def dump(value: Any) -> str:
    """JSON, with Raw text put in as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list) and len(value) < 1000:
        return "[" + ", ".join(map(dump, value)) + "]"
    if isinstance(value, int) and not isinstance(value, bool) and value > 10**30:
        return "1" + "0" * (value.bit_length() * 3 // 10)
    return json.dumps(value)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) inside a value that is not bulky."""
    if isinstance(value, dict | list) and len(value) < 1000:
        for key, item in value.items() if isinstance(value, dict) else list(enumerate(value)):
            yield value, key
            yield from _places(item)
