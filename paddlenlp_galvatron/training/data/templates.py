"""Chat templates: a conversation as text, split by role.

Two kinds are read: PaddleNLP's chat_template.json, with a template for each part, and Hugging Face's Jinja template of
the tokenizer, for the whole conversation. Both are untrusted programs: they run in Jinja's sandbox and in a separate
process with limits (`open_template`, `conversations`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json import dumps, loads
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import TemplateError, Undefined, meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from ...base import UserError, shortened
from ...base.process import limited
from ...base.reading import read_bytes, read_json, read_text
from .tokenizer import TOKENIZER_CONFIG, special_tokens

PADDLENLP = "chat_template.json"
JINJA = "chat_template.jinja"
PLAIN = "plain"  # no template, even if the tokenizer has one
FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
LONGEST_FAULT = 120  # characters of a fault
LARGEST = 1 << 20  # limit of products, in characters or as a number; its root bounds a power's base and exponent
ANSWERS = "assistant"  # the role whose messages are learnt

Message = dict[str, Any]  # role, content, and other fields for the template
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field; transformers accepts any
THOUGHT = "</think>"  # end of the thoughts in an answer
CALLS = ("tool_calls", "function_call")
MARK = "GalvatronLooksForThisAnswer"  # a text that no conversation has


class Turn(NamedTuple):
    """An answer and its end in a text; its prompt starts after the previous turn."""

    start: int
    stop: int
    place: int  # index of the message


@dataclass
class Rendered:
    """A conversation's text and the positions of its parts."""

    text: str
    system: int  # number of characters of the system text
    turns: list[Turn]
    marked: list[tuple[int, int]] | None = None  # by `{% generation %}`, if the template has it
    losses: Counter[str] = field(default_factory=Counter)  # numbers of answers by the field of `Losses`

    def asked(self, messages: Sequence[Message], number: int) -> list[tuple[int, int]]:
        """Positions of the messages' texts in the prompt of a turn, without the system text and the template's text."""
        turn, spans = self.turns[number], list[tuple[int, int]]()
        previous = [each for each in self.turns if each.place < turn.place][-1:]
        begin, stop = max([self.system, *(each.stop for each in previous)]), turn.start
        for message in reversed(messages[previous[0].place + 1 if previous else 0 : turn.place]):
            content = message.get("content", "")
            content = content if content in self.text else content.strip()
            start = self.text.rfind(content, begin, stop)
            if content and start >= 0 and message["role"] != "system":
                spans.append((start, start + len(content)))
                stop = start
        return spans

    def in_front(self, messages: Sequence[Message]) -> str:
        """The text before the first turn, if the rest of the first turn begins like other turns."""
        heads = []
        for number, turn in enumerate(self.turns):
            texts = self.asked(messages, number)
            heads.append(self.text[self.turns[number - 1].stop if number else 0 : min(texts, default=(turn.start,))[0]])
        return next((heads[0].removesuffix(head) for head in heads[1:] if head and heads[0].endswith(head)), "")


class Compiled(NamedTuple):
    """Parts of a template."""

    templates: list[Any]
    names: frozenset[str]  # variables that they read


class Template(ABC):
    """Compiled at first use, in a process with limits."""

    text: str
    apart: bool  # whether prompts and answers are tokenised one by one
    special_tokens: Mapping[str, str | None] = MappingProxyType({})  # texts by name; None: there is none
    _parts: list[str]
    _path: Path

    @cached_property
    def _compiled(self) -> Compiled:
        return _compiled(self._parts, self._path)

    @property
    def names(self) -> frozenset[str]:
        """Variables that it reads. Raises UserError if it is no template."""
        return self._compiled.names

    @abstractmethod
    def whole(self, messages: Sequence[Message], context: Mapping[str, Any]) -> str:
        """The text. Raises UserError if the template does not accept the conversation."""

    @abstractmethod
    def rendered(self, messages: Sequence[Message], context: Mapping[str, Any]) -> Rendered:
        """Raises UserError as `whole` does."""


class TurnTemplate(Template):
    """PaddleNLP's chat_template.json: a system text, and for each turn the texts of user and bot."""

    apart = True  # PaddleNLP's rule

    def __init__(self, path: Path):
        """Raises UserError."""
        content = read_json(path)
        fields = content if isinstance(content, dict) else {}
        system, turn = fields.get("system") or "", fields.get("conversation")
        if not isinstance(system, str) or not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise UserError(f'{path}: "conversation" must be two texts, the user\'s and the bot\'s, and "system" one')
        self.text, self.file = "\0".join([system, *turn]), read_bytes(path)
        self._parts, self._path = [system, *turn], path

    def whole(self, messages: Sequence[Message], context: Mapping[str, Any]) -> str:
        return self.rendered(messages, context).text

    def rendered(self, messages: Sequence[Message], context: Mapping[str, Any]) -> Rendered:
        values: dict[str, Any] = {**context, "is_training": True}
        rest = list(messages)
        if rest and rest[0]["role"] == "system":
            values["system"] = rest.pop(0)["content"]
        roles = [message["role"] for message in rest]
        if roles != ["user", ANSWERS] * (len(rest) // 2):
            raise UserError(f"{PADDLENLP} takes user and {ANSWERS} in turn; here is {shortened(', '.join(roles))}")
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        system, *turn = self._compiled.templates
        text = _rendered(system, values)
        result = Rendered(text, len(text), [])
        for index, (user, bot) in enumerate(pairs):
            fields = {"user": user.get("content", ""), "bot": bot.get("content", ""), "index": index}
            fields |= values | {"is_first": index == 0, "is_last": index == len(pairs) - 1}
            asked, answer = (_rendered(template, fields) for template in turn)
            start = len(result.text) + len(asked)
            result.text += asked + answer
            result.turns.append(Turn(start, len(result.text), len(messages) - len(rest) + 2 * index + 1))
        return result


class WholeTemplate(Template):
    """A tokenizer's template, which renders all messages at once. An answer is the text that the template adds to the
    previous messages and the generation prompt, so it may hold any text.

    Some templates remove the thoughts from every answer, but their generation prompt opens them (R1-Distill's ends with
    `<think>`). Thoughts of the last answer are learnt after that prompt, as the model must write them; an answer
    without thoughts begins where the template puts it.
    """

    apart = False

    def __init__(self, text: str, special_tokens: Mapping[str, str | None], path: Path):
        """`special_tokens`: their texts by name; None: there is none."""
        self.text, self._parts, self._path, self.special_tokens = text, [text], path, dict(special_tokens)
        self._special = {
            name: Undefined(name=name) if token is None else token for name, token in self.special_tokens.items()
        }

    def rendered(self, messages: Sequence[Message], context: Mapping[str, Any]) -> Rendered:
        whole = self.whole(messages, context)
        marked = list(self._compiled.templates[0].environment.marked) if "endgeneration" in self.text else None
        result, end, last = Rendered(whole, 0, [], marked), 0, len(messages) - 1
        for index, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            unlearnt = "unlearnt" if message.keys().isdisjoint(CALLS) else "uncalled"
            history = messages[:index]
            asked = self.whole(history, context, prompt=True) if history else self._opening(context)
            answered = self.whole(messages[: index + 1], context)
            if self._loses_thoughts(history, message, context):
                if index < last:
                    result.losses[unlearnt] += 1
                    continue
                answered = result.text = self._with_thoughts(history, message, asked, context)
                result.marked = None
            elif not answered.startswith(asked):
                begun, opened, _ = self._around(history, message, asked, context)
                if opened and answered.startswith(begun):
                    asked = begun
                    result.losses["unopened"] += 1
            if result.text.startswith(answered) and answered.startswith(asked) and len(asked) >= end:
                end = len(answered)
                result.turns.append(Turn(len(asked), end, index))
            elif index == last:
                raise UserError("the chat template's generation prompt is not how it begins an answer")
            else:
                result.losses[unlearnt] += 1
        try:  # before all turns: a start, a system text, tools
            system = self.whole(messages[: messages[0]["role"] == "system"], context)
        except UserError:  # some templates require a user's message
            system = result.in_front(messages)
        if result.turns and result.text[: result.turns[0].start].startswith(system):
            result.system = len(system)
        return result

    def _opening(self, context: Mapping[str, Any]) -> str:
        """The text before an answer without previous messages: many templates refuse an empty conversation."""
        answer: list[Message] = [{"role": ANSWERS, "content": MARK}]
        text = self.whole(answer, context)
        prompt = self.whole(answer, context, prompt=True).removeprefix(text)
        begun = text.partition(MARK)[0]
        if not prompt:
            return begun.rstrip()  # spaces before the answer belong to it
        return begun[: begun.rfind(prompt) + len(prompt)] if prompt in begun else begun

    def _loses_thoughts(self, history: Sequence[Message], message: Message, context: Mapping[str, Any]) -> bool:
        content_text = message.get("content", "")
        marked = {**message, "content": content_text.replace(THOUGHT, MARK + THOUGHT)}
        return THOUGHT in content_text and MARK not in self.whole([*history, marked], context)

    def _with_thoughts(
        self, history: Sequence[Message], message: Message, asked: str, context: Mapping[str, Any]
    ) -> str:
        """The answer as the model must write it after the generation prompt. Raises UserError."""
        content_text: str = message["content"]
        if not message.keys().isdisjoint(REASONING):
            raise UserError("an answer has thoughts in its content, too, and the chat template takes one; give one")
        if asked.rstrip().endswith(THOUGHT):
            raise UserError(
                "the chat template takes an answer's thoughts out, and its generation prompt has none; take them out, "
                "too, or name another template: galvatron train --chat_template"
            )
        _, opened, ended = self._around(history, message, asked, context)
        return (
            asked
            + (content_text.lstrip().removeprefix(opened.strip()).lstrip("\n") if opened else content_text)
            + ended
        )

    def _around(
        self, history: Sequence[Message], message: Message, asked: str, context: Mapping[str, Any]
    ) -> tuple[str, str, str]:
        """The text before an answer; the rest of the generation prompt, if the text is its start; the end."""
        begun, _, ended = self.whole([*history, {**message, "content": MARK}], context).partition(MARK)
        return begun, asked[len(begun) :] if asked.startswith(begun) else "", ended

    def whole(self, messages: Sequence[Message], context: Mapping[str, Any], prompt: bool = False) -> str:
        values = {**self._special, "tools": None, "documents": None, **context}
        values |= {"messages": [_reasoning(message) for message in messages], "add_generation_prompt": prompt}
        return _rendered(self._compiled.templates[0], values)


def _reasoning(message: Message) -> Message:
    """The message with its thoughts under all names that templates read, as in transformers."""
    thoughts = next((message[name] for name in REASONING if name in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def open_template(wanted: str | None, tokenizer: Path) -> Template | None:
    """The requested template: a file, or a folder that has one; unset: the tokenizer's template, if it has one.

    Raises UserError."""
    if wanted == PLAIN:
        return None

    if template := _opened(wanted, tokenizer):
        what = f"{wanted or tokenizer}: reading its chat template"
        names = loads(limited(lambda: dumps([*template.names]).encode(), what, 0))
        template.special_tokens = {name: token for name, token in template.special_tokens.items() if name in names}
    return template


def _opened(wanted: str | None, tokenizer: Path) -> Template | None:
    if wanted is None:
        return _own(tokenizer)
    path = Path(wanted)
    if path.is_dir():
        if (path / PADDLENLP).is_file():
            return TurnTemplate(path / PADDLENLP)
        if template := _own(path):
            return template
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
        named = {str(entry.get("name")): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if text is None:
        return None
    if not isinstance(text, str):
        raise UserError(f"{path}: chat_template: is no text; name one of your own: galvatron train --chat_template")
    return WholeTemplate(text, special_tokens(folder).texts, path)


class _Generation(Extension):
    """`{% generation %}`, by which some templates mark the learnt text. During rendering the environment has the text
    blocks so far (`blocks`) and the starts and ends of marked text (`marked`)."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def __init__(self, environment: Any):
        super().__init__(environment)
        environment.extend(blocks=[], marked=[])

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body, lineno=line)

    def _mark(self, caller: Callable[[], str]) -> str:
        environment: Any = self.environment
        text, begin = caller(), len("".join(environment.blocks))
        environment.marked.append((begin, begin + len(text)))
        return text


class _Unknown(Undefined):
    """An undefined variable: empty text, but an error for a special token, which must not be missing silently."""

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


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounded products; it bounds ranges itself, and a process with limits bounds the rest."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raises OverflowError."""
        first, second = (len(value) if hasattr(value, "__len__") else abs(value) for value in (left, right))
        if (first * second if operator == "*" else max(first, second) ** 2) > LARGEST:
            raise OverflowError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _environment() -> Any:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = _Sandbox(
        optimized=False,  # the optimizer would evaluate constants while parsing
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        undefined=_Unknown,
    )
    # No strftime_now, which some templates write into the system text: samples would change daily.
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **options: dumps(value, **{"ensure_ascii": False, **options})
    return environment


def _compiled(texts: Sequence[str], path: Path) -> Compiled:
    """Raises UserError."""
    try:
        trees = [_environment().parse(text) for text in texts]
        names = [meta.find_undeclared_variables(tree) for tree in trees]
        return Compiled([_environment().from_string(text) for text in texts], frozenset().union(*names))
    except (SyntaxError, *FAULTS) as error:  # Python's own: it is nested too deeply
        raise UserError(f"{path}: is no Jinja template: {shortened(str(error), LONGEST_FAULT)}") from None


def _rendered(template: Any, values: Mapping[str, Any]) -> str:
    blocks = template.environment.blocks
    blocks.clear()
    template.environment.marked.clear()
    try:
        for block in template.generate(**values):  # one by one, as marks count the blocks so far
            blocks.append(block)
        return "".join(blocks)
    except FAULTS as error:
        raise UserError(f"the chat template refuses it: {shortened(str(error), LONGEST_FAULT)}") from None
