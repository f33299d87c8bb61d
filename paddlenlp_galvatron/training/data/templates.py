"""Chat templates: a conversation as text, apart by who said it.

Two kinds are read: PaddleNLP's chat_template.json, a template for each part, and the tokenizer's own Jinja template,
one for all, as Hugging Face has it. Both run in Jinja's sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError, Undefined, meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from ...base.errors import UserError
from ...base.reading import read_json, read_text
from ...base.text import shortened
from .special_tokens import TOKENIZER_CONFIG, special_tokens

PADDLENLP = "chat_template.json"
JINJA = "chat_template.jinja"
PLAIN = "plain"  # no template, even if the tokenizer has one
FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
LONGEST_FAULT = 120  # characters of one
ANSWERS = "assistant"  # whose messages are learnt

Message = dict[str, str]  # role and content


class Parts(NamedTuple):
    """A conversation's text, piece by piece."""

    system: str
    turns: list[tuple[str, str]]  # prompt, and answer with its end, which is learnt
    unlearnt: int = 0  # answers that stand among what is asked, as the template changes them when more follows


class Template(Protocol):
    def parts(self, messages: Sequence[Message], context: Mapping[str, Any]) -> Parts:
        """Raises UserError: the conversation is none that the template takes."""


class TurnTemplate:
    """PaddleNLP's chat_template.json: a system text, and for each turn what the user and what the bot says."""

    def __init__(self, path: Path):
        """Raises UserError."""
        content = read_json(path)
        told = content if isinstance(content, dict) else {}
        system, turn = told.get("system") or "", told.get("conversation")
        if not isinstance(system, str) or not isinstance(turn, list) or [type(part) for part in turn] != [str, str]:
            raise UserError(f'{path}: "conversation" must be two texts, the user\'s and the bot\'s, and "system" one')
        self.text = "\0".join([system, *turn])
        self._system, *self._turn = (_compiled(part, path) for part in (system, *turn))

    def parts(self, messages: Sequence[Message], context: Mapping[str, Any]) -> Parts:
        given: dict[str, Any] = {**context, "is_training": True}
        rest = list(messages)
        if rest and rest[0]["role"] == "system":
            given["system"] = rest.pop(0)["content"]
        roles = [message["role"] for message in rest]
        if roles != ["user", ANSWERS] * (len(rest) // 2):
            raise UserError(f"{PADDLENLP} takes user and {ANSWERS} in turn; here is {shortened(', '.join(roles))}")
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        turns = []
        for index, (user, bot) in enumerate(pairs):
            told = {"user": user["content"], "bot": bot["content"], "index": index}
            told |= given | {"is_first": index == 0, "is_last": index == len(pairs) - 1}
            asked, answer = (_rendered(part, told) for part in self._turn)
            turns.append((asked, answer))
        return Parts(_rendered(self._system, given), turns)


class WholeTemplate:
    """A tokenizer's own template, which renders all messages at once. An answer is what the template adds to the
    messages before it and the generation prompt; so an answer may hold whatever text it likes."""

    def __init__(self, text: str, special_tokens: Mapping[str, str | None], path: Path):
        """`special_tokens`: their texts by name; None: there is none. Raises UserError."""
        self.text, self._template = text, _compiled(text, path)
        names = meta.find_undeclared_variables(_environment().parse(text))
        self.special_tokens = {name: token for name, token in special_tokens.items() if name in names}  # all it reads
        self._special = {
            name: Undefined(name=name) if token is None else token for name, token in self.special_tokens.items()
        }

    def parts(self, messages: Sequence[Message], context: Mapping[str, Any]) -> Parts:
        if "system" in context and messages and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": str(context["system"])}, *messages]
        whole, end, turns, unlearnt = self._render(messages), 0, list[tuple[str, str]](), 0
        for place, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            asked, answered = self._render(messages[:place], prompt=True), self._render(messages[: place + 1])
            if whole.startswith(answered) and answered.startswith(asked) and len(asked) >= end:
                turns.append((whole[end : len(asked)], answered[len(asked) :]))
                end = len(answered)
            elif place == len(messages) - 1:
                raise UserError("the chat template's generation prompt is not how it begins an answer")
            else:
                unlearnt += 1
        system = ""
        if turns and messages[0]["role"] == "system":
            try:
                system = self._render(messages[:1])
            except UserError:  # some templates want a user's message
                system = ""
            asked, answer = turns[0]
            if asked.startswith(system):
                turns[0] = asked[len(system) :], answer
            else:
                system = ""
        return Parts(system, turns, unlearnt)

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        return _rendered(self._template, {**self._special, "messages": list(messages), "add_generation_prompt": prompt})


def open_template(wanted: str | None, tokenizer: Path) -> Template | None:
    """The template that is asked for: a file, or a folder that has one; unset: the tokenizer's own, if it has one.

    Raises UserError."""
    if wanted == PLAIN:
        return None
    if wanted is None:
        return _own(tokenizer)
    path = Path(wanted)
    if path.is_dir():
        if (path / PADDLENLP).is_file():
            return TurnTemplate(path / PADDLENLP)
        if own := _own(path):
            return own
        raise UserError(f"chat_template: {path} has neither {PADDLENLP} nor a tokenizer's own template; name the file")
    if path.suffix == ".json":
        return TurnTemplate(path)
    return WholeTemplate(read_text(path), special_tokens(tokenizer).texts, path)


def _own(folder: Path) -> WholeTemplate | None:
    """The Jinja template that a tokenizer's folder has."""
    folder = folder if folder.is_dir() else folder.parent
    if (folder / JINJA).is_file():
        return WholeTemplate(read_text(folder / JINJA), special_tokens(folder).texts, folder / JINJA)
    path = folder / TOKENIZER_CONFIG
    content = read_json(path) if path.is_file() else {}
    text = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(text, list):  # several, by name
        named = {str(one.get("name")): one.get("template") for one in text if isinstance(one, dict)}
        text = named.get("default")
    if text is None:
        return None
    if not isinstance(text, str):
        raise UserError(f"{path}: chat_template: is no text; name one of your own: --chat_template")
    return WholeTemplate(text, special_tokens(folder).texts, path)


class _Generation(Extension):
    """`{% generation %}`, by which some templates mark answers: what is in it is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Unknown(Undefined):
    """A variable that nobody gives: no text, except that a special token must not be missing without a word."""

    def __str__(self) -> str:
        if self._is_token:
            self._fail_with_undefined_error()
        return super().__str__()

    @property
    def _is_token(self) -> bool:
        return self._undefined_obj is missing and str(self._undefined_name).endswith("_token")

    @property
    def _undefined_message(self) -> str:
        if self._is_token:
            return f"{self._undefined_name} is not defined; name it, or null for none, in {TOKENIZER_CONFIG}"
        return super()._undefined_message


def _environment() -> Any:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        undefined=_Unknown,
    )
    # No strftime_now, which some templates write into the system text: samples would change from day to day.
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **options: dumps(value, ensure_ascii=False, **options)
    return environment


def _compiled(text: str, path: Path) -> Any:
    try:
        return _environment().from_string(text)
    except TemplateError as error:
        raise UserError(f"{path}: is no Jinja template: {error}") from None


def _rendered(template: Any, values: Mapping[str, Any]) -> str:
    try:
        return str(template.render(**values))
    except FAULTS as error:
        raise UserError(f"the chat template refuses it: {shortened(str(error), LONGEST_FAULT)}") from None
