"""Types of the strategy files' fields, and how their faults are worded."""

import difflib
import re
from itertools import permutations
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, PlainSerializer, ValidationError
from pydantic.json_schema import WithJsonSchema

from ..base import UserError, plain_fault, shortened
from ..base.limits import MOST_LAYERS, Layers, Ranks
from ..model import Recompute
from ..model.layer import MODULES, PARTLY

LONGEST_LIST = 16 * MOST_LAYERS  # characters
T = TypeVar("T")
File = TypeVar("File", bound=BaseModel)


def _pattern(number: str) -> str:
    """Pattern of a list in a strategy file, which is a string such as "1,2,2,1"."""
    return f"^{number}( *, *{number})*$"


def _split(value: object) -> list[int]:
    if isinstance(value, str) and len(value) > LONGEST_LIST:
        raise ValueError(f"has {len(value):,} characters; a model has at most {MOST_LAYERS} layers")
    if not isinstance(value, str) or not re.fullmatch(_pattern("(0|[1-9][0-9]{0,8})"), value):
        raise ValueError(f'must be a string of numbers separated by commas, such as "1,2,2,1"; it is {shown(value)}')
    return [int(number) for number in value.split(",")]


def _words(value: object) -> list[str]:
    if not isinstance(value, str):
        raise ValueError(f'must be a string of words, such as "none,norms+mlp,full"; it is {shown(value)}')
    if len(value) > 2 * LONGEST_LIST:
        raise ValueError(f"has {len(value):,} characters; a model has at most {MOST_LAYERS} layers")
    return [word.strip() for word in value.split(",")]


def _recompute(word: object) -> Recompute:
    try:
        return Recompute.of(str(word))
    except ValueError as error:
        raise ValueError(f"{error}; it is {shown(word)}") from None


def shown(value: object) -> str:
    return shortened(repr(value), 40)


Flag = Annotated[int, Field(ge=0, le=1)]
ListOf = Annotated[
    list[T], BeforeValidator(_split), PlainSerializer(lambda numbers: ",".join(map(str, numbers)), return_type=str)
]
COUNTS = WithJsonSchema({"type": "string", "pattern": _pattern("[1-9][0-9]{0,8}")})
Degrees = Annotated[ListOf[Ranks], COUNTS]
Division = Annotated[ListOf[Layers], COUNTS]
Percents = Annotated[
    ListOf[Annotated[int, Field(ge=0, le=100)]],
    WithJsonSchema({"type": "string", "pattern": _pattern("(100|[1-9]?[0-9])")}),
]
Flags = Annotated[ListOf[Flag], WithJsonSchema({"type": "string", "pattern": _pattern("[01]")})]
_PARTLY = "|".join("[+]".join(order) for each in (*PARTLY, *MODULES) for order in permutations(each.words.split("+")))
Recomputes = Annotated[
    list[Annotated[InstanceOf[Recompute], BeforeValidator(_recompute)]],
    BeforeValidator(_words),
    PlainSerializer(lambda layers: ",".join(each.words for each in layers), return_type=str),
    WithJsonSchema({"type": "string", "pattern": _pattern(f"(none|full|{_PARTLY})")}),
]


def parse(kind: type[File], data: dict[str, Any]) -> File:
    """The fields of a file of this kind. Raises UserError, a line per fault; identical faults of layers are merged."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults: dict[tuple[str, str], list[int]] = {}  # where and what, and in which entries of a list
        for item in error.errors():
            name, entry, what = _fault(kind, item)
            faults.setdefault((name, what), []).extend(() if entry is None else (entry,))
        raise UserError(f"{name}: {_entries(name, at)}{what}" for (name, what), at in faults.items()) from None


def _fault(kind: type[BaseModel], error: Any) -> tuple[str, int | None, str]:
    """Field, entry of a list, and what is wrong."""
    *parents, last = error["loc"]
    name = ".".join(str(key) for key in error["loc"])
    if error["type"] == "missing":
        return name, None, f"missing; add it ({kind.model_fields[name].description})"
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(last), _siblings(kind, parents), n=1)
        return name, None, f"unknown field; {f'did you mean {close[0]}?' if close else 'remove it'}"
    shown_input = "" if error["type"] == "value_error" else f"; it is {shown(error['input'])}"
    what = f"{plain_fault(error)}{shown_input}"
    return (".".join(map(str, parents)), last, what) if isinstance(last, int) else (name, None, what)


def _entries(name: str, at: list[int]) -> str:
    if not at:
        return ""
    unit = "stage" if name in ("pp_division", "galvatron.predicted.stages") else "layer"
    return f"{unit} {at[0]}: " if len(at) == 1 else f"{unit}s {at[0]} to {at[-1]}, {len(at)} of them: "


def _siblings(kind: type[BaseModel], parents: list[Any]) -> list[str]:
    """The fields of the object within which a field stands."""
    for parent in parents:
        options = (kind.model_fields[parent].annotation, *get_args(kind.model_fields[parent].annotation))
        kind = next(choice for choice in options if isinstance(choice, type) and issubclass(choice, BaseModel))
    return list(kind.model_fields)
