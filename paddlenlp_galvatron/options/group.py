"""Options, from a command line, a file or a mapping to checked fields. Every command, script and `api` takes this path.

Words of a command line -> (name, value) -> canonical name and value -> groups of fields, `Options`, which check them.
"""

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ..base import LARGEST_OPTIONS, Note, UserError, no_note, plain_fault, read_json, read_yaml, shortened
from ..base.limits import Size
from .aliases import OVERRIDDEN, VALUES, canonical_name, canonical_value, other_defaults, plain_name, unknown
from .foreign import MODEL_FIELDS, SEVERAL, SWITCHES, Fate, idle_note, outcome_of, program_of

UNSET = "None"  # a script's value for an unset option
BOOLEAN_WORDS = ("0", "1", "false", "true")
PLACES = ("output", "output_dir", "output_config_path")  # options that -o means
MOST_OPTIONS = 500  # most options in a file
MOST_NAMED = 10  # options in a line, which are refused for one reason


def split_numbers(value: object) -> object:
    """Numbers that commas join, or one."""
    if isinstance(value, str):
        return value.replace(" ", "").split(",")
    return [value] if isinstance(value, int) else value


def _listed(value: object) -> object:
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


Paths = Annotated[tuple[Path, ...], BeforeValidator(_listed)]  # a.json,b.json or a list
Sizes = Annotated[tuple[Size, ...], BeforeValidator(split_numbers), Field(min_length=1)]  # 4096,8192 or a list


class Options(BaseModel):
    """Frozen; build one from loose values with `from_mapping`."""

    panel: ClassVar[str] = "Options"  # panel of a command's help
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _in_utf8(cls, values: Any) -> Any:
        """Refuse paths that are not UTF-8, as files and other programs receive them."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, str | Path) and any("\ud800" <= char <= "\udfff" for char in str(value)):
                raise ValueError(f"{name}: {str(value)!a} is not UTF-8; rename it, or set LC_ALL=C.UTF-8")
        return values

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Read values by canonical name or alias, as flags and config files give them. Raises UserError."""
        return cls.from_values(canonical_options(values, cls.model_fields))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Read this group's fields from canonical options. Raises UserError."""
        try:
            return cls.model_validate({name: value for name, value in values.items() if name in cls.model_fields})
        except ValidationError as error:
            raise UserError(_fault(item) for item in error.errors()) from None


def _fault(error: Any) -> str:
    """An error of pydantic as a message: the option, the fault, and the value."""
    if not error["loc"]:
        return str(error["msg"].removeprefix("Value error, "))
    name = error["loc"][0]  # without the index in a list, which the value shows
    if error["type"] == "missing":
        return f"{name}: missing; give --{name}"
    several = name in ("world_size", "gpus") and ("," in str(error["input"]) or isinstance(error["input"], list))
    remedy = "; galvatron fit compares several" * several
    return f"{name}: {plain_fault(error)} (it is {shortened(repr(error['input']))}){remedy}"


def as_given(fault: str, words: Iterable[str], options: Container[str]) -> str:
    """A fault with the option's canonical name replaced by the name in the command line."""
    for word in words:
        typed = word.partition("=")[0]
        if typed.startswith("--") and fault.startswith(f"{canonical_name(typed, options)}: "):
            return plain_name(typed) + fault[fault.index(":") :]
    return fault


def is_boolean(field: FieldInfo) -> bool:
    """Whether an option is a boolean, possibly optional."""
    return field.annotation in (bool, bool | None)


def read_words(
    words: Sequence[str], booleans: Mapping[str, bool], say: Note = no_note, shared: Mapping[str, Fate] = {}
) -> tuple[list[tuple[str, Any]], list[str]]:
    """Options of a command line as in `canonical_pairs` (which describes the arguments), and the other words. Raises
    UserError with one line a fault."""
    options: list[tuple[str, str]] = []
    positional: list[str] = []
    missing: list[str] = []
    rest = deque(words)
    plain = {plain_name(word.partition("=")[0]) for word in rest if word.startswith("--")}
    output_name = next((name for name in PLACES if name in booleans), "o")
    while rest:
        word = rest.popleft()
        if word == "--":
            positional += rest
            break
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        typed, equals, behind = word.partition("=")
        typed = f"--{output_name}" if typed == "-o" else typed
        name = canonical_name(typed, booleans)
        value = behind if equals else _take(rest, typed, name, booleans.get(name))
        if value is not None:
            options.append((typed, value))
        elif name == plain_name(typed) or name not in plain:  # else: `--device h100 --analytic`, which adds nothing
            missing.append(f"{typed}: a value is missing; give {typed} VALUE")
    try:
        pairs = canonical_pairs(options, booleans, say, shared, "--")
    except UserError as error:
        raise UserError([*missing, *error.faults]) from None
    if missing:
        raise UserError(missing)
    return pairs, positional


def _take(rest: deque[str], typed: str, name: str, boolean: bool | None) -> str | None:
    """Removes the value of an option from the words after it. `boolean`: None for an unknown option."""
    weighted = name == "input_dir" and bool(rest) and rest[0].replace(".", "", 1).isdigit()  # 0.7 a 0.3 b, as Megatron
    if weighted or name in SEVERAL:
        several = []
        while rest and not rest[0].startswith("--"):
            several.append(rest.popleft())
        return " ".join(several)
    following = rest[0] if rest else "--"
    switch = boolean or (boolean is None and name in SWITCHES) or "true" in VALUES.get(plain_name(typed), {})
    if switch and not any(map(_is_boolean_word, (following, canonical_value(typed, following)))):
        return "true"
    if following.startswith("--"):
        return None if boolean is False else ""
    return rest.popleft()


def read_options(path: Path) -> dict[str, Any]:
    """Options by the names in the file, those in sections next to the rest. Raises UserError.

    A section is a named object, such as SearchEngineArgs; its name has no meaning.
    """
    content = read_json(path, LARGEST_OPTIONS) if path.suffix == ".json" else read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no options; write one a line, as memory_constraint: 36")
    if program := program_of(content):
        raise UserError(f"{path}: is a file of {program}, whose options differ; write ours: galvatron train --help")
    result: dict[str, Any] = {}
    for name, value in content.items():
        for key, inner in value.items() if isinstance(value, dict) else [(name, value)]:
            if isinstance(inner, dict):
                raise UserError(
                    f"{path}: {name}.{key} is a section within a section, as Galvatron's newest scripts have them; "
                    "write options at the top, or in one level of sections"
                )
            if "${" in str(inner) and key != "on_event":  # the event's shell expands ${…} itself
                raise UserError(f"{path}: {key} refers to another value, {inner}; write the value itself")
            if key in result:
                raise UserError(f"{path}: {key} stands there twice; keep one")
            result[key] = inner
    if len(result) > MOST_OPTIONS:
        raise UserError(f"{path}: names {len(result)} options, and no command has {MOST_OPTIONS}; right file?")
    return result


def canonical_options(
    values: Mapping[str, Any], options: Iterable[str], say: Note = no_note, shared: Mapping[str, Fate] = {}
) -> dict[str, Any]:
    """Values by canonical name, without those that are unset; `say` and `shared` as in `canonical_pairs`.

    Raises UserError: an option is unknown, or given by two names.
    """
    pairs = canonical_pairs(values.items(), dict.fromkeys(options, False), say, shared)
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [(typed, canonical_name(typed, result)) for typed in values]
        twice = {name for name in result if [ours for _, ours in names].count(name) > 1}
        raise UserError(f"{typed}: given twice, also as {ours}" for typed, ours in names if ours in twice - {typed})
    return result


def canonical_pairs(
    typed: Iterable[tuple[str, Any]],
    booleans: Mapping[str, bool],
    say: Note = no_note,
    shared: Mapping[str, Fate] = {},
    dashes: str = "",
) -> list[tuple[str, Any]]:
    """Pairs (canonical name, value) of options under any of their names, without those that are unset or have no
    effect.

    `booleans`: every option of the command -> whether it is a boolean whose word is checked here. `shared`: another
    command's options, which scripts pass to all -> outcome here. `dashes` stand in front of names in messages. `say`
    receives which options have no effect. Raises UserError with one line a reason.
    """
    pairs = list(typed)
    plain = {plain_name(name) for name, _ in pairs}
    result: list[tuple[str, Any]] = []
    refused: defaultdict[str, list[str]] = defaultdict(list)  # reason -> options
    idle: dict[str, str] = {}
    for word, value in pairs:
        name = canonical_name(word, booleans)
        value = canonical_value(word, value, booleans)
        if OVERRIDDEN.get(plain_name(word)) in plain:
            idle[word] = f"{dashes}{name} holds"
        elif name in MODEL_FIELDS and "lr_scheduler_type" in booleans:  # training compares it with the model
            result.append((name, value))
        elif name not in booleans:
            outcome = outcome_of(name, value, shared)
            if outcome is None:
                refused[f": {unknown(word, booleans, dashes)}"].append(word)
            elif outcome.fault:
                refused[f" is not supported: {outcome.fault}"].append(f"{word}: {value}")
            elif outcome.idle:
                idle[word] = outcome.idle
        elif value is None or value == UNSET:
            continue
        elif booleans[name] and not _is_boolean_word(value):
            refused[f": {value!r} is no boolean; give 0, 1, true or false, or nothing for true"].append(word)
        else:
            result.append((name, value))
    if refused:
        raise UserError(_line(options, reason) for reason, options in refused.items())
    if idle:
        say(idle_note(idle))
    if differing := other_defaults(plain, booleans):
        say(differing)
    return result


def _line(options: Sequence[str], reason: str) -> str:
    more = f" and {len(options) - MOST_NAMED} more" if len(options) > MOST_NAMED else ""
    if len(options) > 1:
        reason = reason.replace(" is not", " are not", 1).replace("unknown option;", "unknown options;")
    return ", ".join(options[:MOST_NAMED]) + more + reason


def _is_boolean_word(value: object) -> bool:
    return str(value).lower() in BOOLEAN_WORDS or value == UNSET
