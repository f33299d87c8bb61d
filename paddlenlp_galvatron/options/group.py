"""Groups of options that flags and config files give, each under one canonical name, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ..base.errors import UserError
from ..base.limits import Size
from ..base.text import shortened
from .canonical import canonical_options


def _split(value: object) -> object:
    if isinstance(value, str):
        return value.replace(" ", "").split(",")
    return [value] if isinstance(value, int) else value


def _listed(value: object) -> object:
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


Paths = Annotated[tuple[Path, ...], BeforeValidator(_listed)]  # a.json,b.json or a list
Sizes = Annotated[tuple[Size, ...], BeforeValidator(_split), Field(min_length=1)]  # 4096,8192 or a list of numbers


PLAIN = {"int_parsing": "must be a whole number", "float_parsing": "must be a number", "bool_parsing": "must be 0 or 1"}


def is_boolean(field: FieldInfo) -> bool:
    """Whether an option is a switch, which may be unset."""
    return field.annotation in (bool, bool | None)


class Options(BaseModel):
    """Frozen; build one from loose values with `from_mapping`."""

    panel: ClassVar[str] = "Options"  # of a command's help, in which they stand
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _in_utf8(cls, values: Any) -> Any:
        """Files and other programs are told of paths, which Linux lets be any bytes."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, str | Path) and any("\ud800" <= char <= "\udfff" for char in str(value)):
                raise ValueError(f"{name}: {str(value)!a} is not UTF-8; rename it, or set LC_ALL=C.UTF-8")
        return values

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From values by canonical name or alias, as flags and config files give them. Raises UserError."""
        return cls.from_values(canonical_options(values, cls.model_fields))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """From those of the canonical options that are this group's. Raises UserError."""
        try:
            return cls.model_validate({name: value for name, value in values.items() if name in cls.model_fields})
        except ValidationError as error:
            raise UserError(_fault(item) for item in error.errors()) from None


def _fault(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if not name:
        return str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{name}: missing; give --{name}"
    return f"{name}: {in_words(error)}"


def in_words(error: Any) -> str:
    """One of pydantic's errors: what is wrong with the value, and the value."""
    message = PLAIN.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]} (it is {shortened(repr(error['input']))})"
