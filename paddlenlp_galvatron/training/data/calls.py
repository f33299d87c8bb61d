"""Arguments of tool calls: an object, or as OpenAI's API returns them, JSON in a text. A chat template writes one
of the two rightly; many put a text into quotes a second time, others take a text alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

from ...base.errors import UserError
from ...base.reading import parse_json
from .templates import CALLS, MARK, Message, Template


def with_objects(message: Message, field: str) -> Message:
    """The message, with an object where the arguments of a call are an empty text. Raises UserError: they are another
    text that is no JSON object."""
    return _with_arguments(message, lambda given: (_object(given, field) and given) or {})


def in_its_form(template: Template, messages: Sequence[Message], context: Mapping[str, Any]) -> list[Message]:
    """The messages with arguments in the form that the template writes rightly: as they are, if it does. Raises
    UserError: it does neither."""
    given = list(messages)
    if all(message.keys().isdisjoint(CALLS) for message in given):
        return given
    objects = [_with_arguments(message, _object) for message in given]
    texts = [_with_arguments(message, _text) for message in objects]
    quoted = False
    for form in (given, objects, texts):
        marked = [_with_arguments(message, _marked) for message in form]
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
    return given  # it refuses the conversation, or leaves calls out


def _with_arguments(message: Message, change: Any) -> Message:
    """The message with changed arguments."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if "function" in call:
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    calls = {name: message[name] for name in CALLS if message.get(name)}
    lists = {
        name: list(map(changed, held)) if isinstance(held, list) else changed(held) for name, held in calls.items()
    }
    return {**message, **lists}


def _object(given: Any, field: str = "tool_calls") -> Any:
    if not isinstance(given, str):
        return given
    found = parse_json(given, f"{field}: arguments of a call") if given.strip() else {}
    if not isinstance(found, dict):
        raise UserError(f"{field}: arguments of a call are no JSON object; give one")
    return found


def _text(given: Any) -> Any:
    return dumps(given, ensure_ascii=False) if isinstance(given, dict) else given


def _marked(given: Any) -> Any:
    marked = {**_object(given), MARK: 1} if isinstance(given, dict | str) else given
    return _text(marked) if isinstance(given, str) else marked
