"""Fields of a line of fine-tuning data and of its messages: honoured or refused.

A field that changes the learnt tokens is honoured, passed to the chat template, which must render it, or refused by
name. Other keys are counted.

Arguments of tool calls are an object or, as from OpenAI's API, JSON in a text. A chat template renders one of the two
correctly; many quote a text a second time, others accept only a text.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

from ...base import UserError, shortened
from ...base.reading import parse_json, read_json
from .templates import ANSWERS, CALLS, MARK, REASONING, Message, Template

NOTHING: tuple[object, ...] = ("", [], {})  # values of an empty field
MASKS = ("weight", "loss", "train", "trainable")  # keys of a line or message; 0, false: not learnt
OF_LINES = ("context", "system", "tools", *MASKS)
OF_TEMPLATES = ("name", "tool_call_id")  # keys of a message that many templates do not need
# Names of keys, and remedies of refused keys.
WORDS = read_json(Path(__file__).with_name("fields.json"))
OF_CHATS = frozenset(WORDS["of_chats"])  # keys that the context may not set
OF_FORMATS = frozenset(WORDS["of_formats"])  # keys of other formats, or of the other half of its own
MEDIA, LOSS = frozenset(WORDS["media"]), frozenset(WORDS["loss"])
CHANGING = MEDIA | LOSS | frozenset(WORDS["changing"])  # keys with one of these words seem to change the learnt tokens
REMEDIES: dict[str, str] = WORDS["remedies"]
PAIR_REMEDIES = REMEDIES | WORDS["pair_remedies"]


class LineMessage(NamedTuple):
    """A message of a conversation."""

    message: Message  # the chat template's form
    field: str  # its name in the line
    learnt: bool = False


class Parsed(NamedTuple):
    """A conversation of a line."""

    contents: list[LineMessage]
    context: Mapping[str, Any]  # other values that a chat template reads
    unread: list[str]  # keys that have no meaning here


def changes_learning(key: str) -> bool:
    """Whether an unsupported key seems to change the learnt tokens."""
    return key not in OF_TEMPLATES and not CHANGING.isdisjoint(_words(key))


def require_rendered(template: Template, contents: Sequence[LineMessage], context: Mapping[str, Any]) -> None:
    """Raises UserError if the chat template leaves out a message, tools, or a field that changes the learnt tokens."""

    def text(messages: Sequence[Message], fields: Mapping[str, Any] = context) -> str | None:
        try:
            return template.whole(messages, fields)
        except UserError:
            return None  # the template reads the changed field

    def lost(field: str) -> UserError:
        return UserError(f"{field}: the chat template leaves it out; give another: galvatron train --chat_template")

    for name in context:
        if name not in template.names:
            raise lost(name if name == "tools" else f"context.{name}")
    messages = [content.message for content in contents]
    if context.get("tools") and text(messages, {**context, "tools": None}) == text(messages):
        raise lost("tools")
    marked = text([_marked(message, index) for index, message in enumerate(messages)])
    for index, content in enumerate(contents):
        if marked is not None and content.message.get("content", "").strip() and _mark(index) not in marked:
            raise lost(content.field)
        for key, value in content.message.items():
            if value not in NOTHING and key not in ("role", "content") and changes_learning(key):
                # Later messages may rightly change it: earlier answers lose their thoughts.
                marked_messages = [*messages[:index], {**content.message, key: f"{value}{_mark(index)}"}]
                if not isinstance(value, str):
                    del marked_messages[-1][key]
                if text(marked_messages) == text(messages[: index + 1]):
                    raise lost(f"{content.field}.{key}")


def _marked(message: Message, index: int) -> Message:
    content = message.get("content", "")
    return {**message, "content": f"{content}{_mark(index)}"} if content.strip() else message


def _mark(index: int) -> str:
    """A text that occurs in no conversation, of letters and digits only, since templates may write JSON."""
    return f"GalvatronLooksFor{index}Here"


def _words(key: str) -> list[str]:
    return [word.lower() for word in re.findall("[A-Z]*[a-z]+|[A-Z]+", key)]


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls, which tables with several kinds of lines use for missing fields; transformers also drops them."""
    return {key: value for key, value in values.items() if value is not None}


def refuse(key: str, value: object, where: str = "", remedies: Mapping[str, str] = REMEDIES) -> None:
    """Raises UserError if a field is not empty."""
    if value not in NOTHING:
        remedy = next((remedies[word] for word in _words(key) if word in remedies), "take it out if it does not matter")
        raise UserError(f"{where}{shortened(key)}: seems to change the learnt tokens, but is not honoured; {remedy}")


def of_line(
    record: Mapping[str, Any],
    format_keys: Container[str],
    contents: list[LineMessage],
    unread: list[str],
    remedies: Mapping[str, str] = REMEDIES,
) -> Parsed:
    """The conversation with the fields of its line. Raises UserError."""
    for key, value in record.items():
        if key in OF_LINES or key in format_keys:
            continue
        if key in OF_FORMATS or changes_learning(key):
            refuse(key, value, remedies=remedies)
        elif value not in NOTHING:
            unread.append(key)
    context = _context(record)
    systems = [
        (name, fields["system"])
        for name, fields in (("context.system", context), ("system", record))
        if "system" in fields
    ]
    context.pop("system", None)
    for name, text in systems:
        if not isinstance(text, str):
            raise UserError(f"{name}: is no text; give the system text")
        if not text and name == "system":
            continue  # a column that is empty in most lines
        if contents[0].message["role"] != "system":
            contents = [LineMessage({"role": "system", "content": text}, name), *contents]
        elif contents[0].message["content"] != text:
            raise UserError(f"{name}: {contents[0].field} is another system text; give one")
    if "tools" in record:
        context["tools"] = _tools(record["tools"])
    if _learns(record, "") is False:
        contents = [content._replace(learnt=False) for content in contents]
    return Parsed(contents, context, unread)


def _context(record: Mapping[str, Any]) -> dict[str, Any]:
    """Other values for the template, PaddleNLP's `context`. Raises UserError."""
    context = record.get("context", {})
    context = {} if context in NOTHING else context
    if not isinstance(context, dict):
        raise UserError('context: is no object; give {"system": …}')
    if taken := OF_CHATS.intersection(context):
        raise UserError(f"context.{min(taken)}: belongs to the line itself, or to the chat template; take it out")
    return without_nulls(context)


def _tools(tools: object) -> list[dict[str, Any]]:
    """Descriptions of tools, which may be JSON in a text. Raises UserError."""
    if isinstance(tools, str):
        tools = parse_json(tools, "tools") if tools.strip() else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError("tools: is no list of objects; give a description of each tool")
    return tools


def _learns(message: Mapping[str, Any], where: str) -> bool | None:
    """Whether a line or message is learnt, by its masks; None: no mask. Raises UserError."""
    contents = {}
    for name in MASKS:
        value = message.get(name)
        if value is None:
            continue
        if type(value) not in (bool, int, float) or value not in (0, 1):
            raise UserError(f"{where}{name}: is {shortened(repr(value))}; give 1 or true (learnt), or 0 or false")
        contents[name] = bool(value)
    if len(set(contents.values())) > 1:
        raise UserError(f"{where}{', '.join(contents)}: contradict each other; give one")
    return next(iter(contents.values()), None)


def message_of(entry: object, field: str, unread: list[str]) -> LineMessage:
    """Raises UserError."""
    message = without_nulls(entry) if isinstance(entry, dict) else {}
    role, content = message.get("role"), message.get("content")
    calls = message.get("tool_calls") or message.get("function_call")
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and calls)):
        raise UserError(f"{field}: needs a role and a content, both texts")
    learns = _learns(message, f"{field}.")
    if learns and role != ANSWERS:
        raise UserError(f"{field}: is to be learnt, but only answers (role {ANSWERS}) are; give it no weight")
    message = {key: value for key, value in message.items() if key not in MASKS}
    for key, value in message.items():
        if key in REASONING and not isinstance(value, str):
            raise UserError(f"{field}.{key}: is no text; give the thoughts")
        if key == "tool_calls" and not (isinstance(value, list) and all(isinstance(call, dict) for call in value)):
            raise UserError(f"{field}.{key}: is no list of objects; give a call in each")
        if not (MEDIA | LOSS).isdisjoint(_words(key)):
            refuse(key, value, f"{field}.")
        if key not in ("role", "content", *OF_TEMPLATES) and not changes_learning(key) and value not in NOTHING:
            unread.append(f"messages.{key}")
    # Empty text as arguments of a call means an empty object; other text must be a JSON object.
    message = _with_arguments(message, lambda arguments: (_arguments(arguments, field) and arguments) or {})
    return LineMessage(message, field, role == ANSWERS and learns is not False)


def in_its_form(template: Template, messages: Sequence[Message], context: Mapping[str, Any]) -> list[Message]:
    """The messages with arguments in the form that the template renders correctly, unchanged if possible. Raises
    UserError if it renders neither form correctly."""
    unchanged = list(messages)
    if all(message.keys().isdisjoint(CALLS) for message in unchanged):
        return unchanged
    objects = [_with_arguments(message, _arguments) for message in unchanged]
    texts = [_with_arguments(message, _as_text) for message in objects]
    quoted = False
    for form in (unchanged, objects, texts):
        marked = [_with_arguments(message, _with_mark) for message in form]
        try:
            text = template.whole(marked, context)
        except UserError:
            continue
        wrong = f'\\"{MARK}' in text or f"'{MARK}" in text  # a text in quotes, or Python's form of an object
        if MARK in text and not wrong:
            return form
        quoted = quoted or wrong
    if quoted:
        raise UserError(
            "tool_calls: the chat template writes their arguments neither as an object nor as a text; name another: "
            "galvatron train --chat_template"
        )
    return unchanged  # the template rejects the conversation or omits calls


def _with_arguments(message: Message, change: Any) -> Message:
    """The message with changed arguments."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if "function" in call:
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    calls = {name: message[name] for name in CALLS if message.get(name)}
    lists = {key: list(map(changed, made)) if isinstance(made, list) else changed(made) for key, made in calls.items()}
    return {**message, **lists}


def _arguments(arguments: Any, field: str = "tool_calls") -> Any:
    if not isinstance(arguments, str):
        return arguments
    parsed = parse_json(arguments, f"{field}: arguments of a call") if arguments.strip() else {}
    if not isinstance(parsed, dict):
        raise UserError(f"{field}: arguments of a call are no JSON object; give one")
    return parsed


def _as_text(arguments: Any) -> Any:
    return dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _with_mark(arguments: Any) -> Any:
    marked = {**_arguments(arguments), MARK: 1} if isinstance(arguments, dict | str) else arguments
    return _as_text(marked) if isinstance(arguments, str) else marked
