"""A line of fine-tuning data as a conversation: which of its fields are honoured, and which are refused.

A line is PaddleNLP's {"src": …, "tgt": …}, one text each or a list of turns, or {"messages": [{"role", "content"}, …]}.
In DPO a line is two conversations that differ in their last answer; the larger number in `sort` is the chosen one's:

    {"src": ["u1", "u2"], "tgt": ["b1"], "response": ["good", "bad"], "sort": [1, 0]}

Any field that changes the learnt tokens is honoured, given to the chat template, which must render it, or refused by
name. Other keys are counted.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from ...base.errors import UserError
from ...base.reading import parse_json
from ...base.text import shortened
from .templates import ANSWERS, REASONING, Message, Template

NOTHING: tuple[object, ...] = ("", [], {})  # of a field that says nothing
MASKS = ("weight", "loss", "train", "trainable")  # of a line or a message; 0 and false: not learnt, 1 and true: learnt
OF_LINES = ("context", "system", "tools", *MASKS)
OF_TEMPLATES = ("name", "tool_call_id")  # of a message: names that many templates do not need
OF_CHATS = frozenset(
    ["messages", "tools", "add_generation_prompt", "user", "bot", "index", "is_first", "is_last", "is_training"]
)  # no values of the context
# A key with one of these words changes the learnt tokens, or seems to.
MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})
LOSS = frozenset(["weight", "weights", "loss", "mask", "masks", "train", "trainable", "training", "label", "labels"])
TELLING = frozenset(
    {
        *MEDIA,
        *LOSS,
        *("tool", "tools", "function", "functions", "reasoning", "think", "thinking", "thought", "thoughts"),
        *("system", "history", "chosen", "rejected", "response", "sort", "src", "tgt", "messages", "prefix"),
        *("document", "documents", "template"),
    }
)
REMEDIES = {
    "history": "give earlier turns as src and tgt, or as messages",
    "chosen": "answers are compared by galvatron train --task dpo, as response and sort",
    "rejected": "answers are compared by galvatron train --task dpo, as response and sort",
    "response": "answers are compared by galvatron train --task dpo",
    "sort": "answers are compared by galvatron train --task dpo",
    "label": "it is for SFT, with src and tgt; a message has its own weight",
    "src": "give messages, or src and tgt",
    "tgt": "give messages, or src and tgt",
    "template": "values that a template reads are its context",
    "messages": "pairs are src, tgt, response and sort",
    **dict.fromkeys(MEDIA, "models here read text alone"),
}


class LineMessage(NamedTuple):
    """A message of a conversation."""

    message: Message  # as the chat template takes it
    field: str  # its name in the line
    learnt: bool = False


class Parsed(NamedTuple):
    """A conversation, as a line has it."""

    contents: list[LineMessage]
    context: Mapping[str, Any]  # other values that a chat template reads
    unread: list[str]  # keys that have no meaning here


def conversation_of(record: Mapping[str, Any]) -> Parsed:
    """A line of SFT. Raises UserError."""
    record = _without_nulls(record)
    unread: list[str] = []
    if "messages" in record:
        own: tuple[str, ...] = ("messages",)
        contents = _of_messages(record["messages"], unread)
    else:
        own = ("src", "tgt", "label")
        contents = _of_pairs(record)
    if not contents or contents[-1].message["role"] != ANSWERS:
        raise UserError(f"messages: the last one is no answer (role {ANSWERS}), so there is nothing to learn")
    return _of_line(record, own, contents, unread)


def pair_of(record: Mapping[str, Any]) -> Parsed:
    """A line of DPO: the conversation up to the last question, then the chosen and the rejected answer to it. Raises
    UserError."""
    record = _without_nulls(record)
    if not record.keys() & {"response", "sort"} and record.keys() & {"tgt", "messages"}:
        raise UserError(
            "no response and no sort: this is SFT data; DPO needs two answers to compare, or say --task sft"
        )
    for name in ("chosen", "rejected", "messages"):  # other forms of pairs, which lack src as well
        _refuse(name, record.get(name, ""))
    asked, answered = _texts(record, "src"), [] if record.get("tgt", "") in NOTHING else _texts(record, "tgt")
    if len(asked) != len(answered) + 1:
        raise UserError(f"src has {len(asked)} texts and tgt {len(answered)}; give one src more")
    given, order = record.get("response"), record.get("sort")
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(one, str) and one.strip() for one in given):
        raise UserError("response: needs two answers, each a text that is not empty")
    if not isinstance(order, list) or len(order) != 2 or not all(type(one) in (int, float) for one in order):
        raise UserError("sort: needs two numbers, the larger one for the better answer")
    if order[0] == order[1]:
        raise UserError("sort: says that both answers are as good; give the better one a larger number")
    asked, answered = ([text.strip() for text in texts] for texts in (asked, answered))  # as PaddleNLP does
    contents = _of_turns(asked[:-1], answered, [False] * len(answered))
    contents.append(LineMessage({"role": "user", "content": asked[-1]}, f"src[{len(answered)}]"))
    for which in sorted(range(2), key=lambda one: -order[one]):
        contents.append(LineMessage({"role": ANSWERS, "content": given[which].strip()}, f"response[{which}]", True))
    return _of_line(record, ("src", "tgt", "response", "sort"), contents, [])


def changes_learning(key: str) -> bool:
    """Whether a key that is not honoured seems to change the learnt tokens."""
    return key not in OF_TEMPLATES and not TELLING.isdisjoint(_words(key))


def require_rendered(template: Template, contents: Sequence[LineMessage], context: Mapping[str, Any]) -> None:
    """Raises UserError if the chat template leaves out a message, tools, or a field that changes the learnt tokens."""

    def text(messages: Sequence[Message], beside: Mapping[str, Any] = context) -> str | None:
        try:
            return template.whole(messages, beside)
        except UserError:
            return None  # it looked at the changed field

    def lost(field: str) -> UserError:
        return UserError(f"{field}: the chat template leaves it out; give another: galvatron train --chat_template")

    for name in context:
        if name not in template.names:
            raise lost(name if name == "tools" else f"context.{name}")
    messages = [one.message for one in contents]
    if context.get("tools") and text(messages, {**context, "tools": None}) == text(messages):
        raise lost("tools")
    marked = text([_marked(message, place) for place, message in enumerate(messages)])
    for place, one in enumerate(contents):
        if marked is not None and one.message.get("content", "").strip() and _mark(place) not in marked:
            raise lost(one.field)
        for key, value in one.message.items():
            if value not in NOTHING and key not in ("role", "content") and changes_learning(key):
                # Later messages may rightly change it: earlier answers lose their thoughts.
                before = [*messages[:place], {**one.message, key: f"{value}{_mark(place)}"}]
                if not isinstance(value, str):
                    del before[-1][key]
                if text(before) == text(messages[: place + 1]):
                    raise lost(f"{one.field}.{key}")


def _marked(message: Message, place: int) -> Message:
    content = message.get("content", "")
    return {**message, "content": f"{content}{_mark(place)}"} if content.strip() else message


def _mark(place: int) -> str:
    """A text that no conversation has; letters and digits alone, as templates may write JSON."""
    return f"GalvatronLooksFor{place}Here"


def _words(key: str) -> list[str]:
    return [word.lower() for word in re.findall("[A-Z]*[a-z]+|[A-Z]+", key)]


def _without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of several kinds of lines give a null where a line lacks a field; transformers leaves them out, too."""
    return {key: value for key, value in given.items() if value is not None}


def _refuse(key: str, value: object, where: str = "") -> None:
    """Raises UserError if a field says anything."""
    if value not in NOTHING:
        remedy = next((REMEDIES[word] for word in _words(key) if word in REMEDIES), "take it out if it does not matter")
        raise UserError(f"{where}{shortened(key)}: seems to change the learnt tokens, but is not honoured; {remedy}")


def _of_line(record: Mapping[str, Any], own: Container[str], contents: list[LineMessage], unread: list[str]) -> Parsed:
    """The conversation with the fields of its line. Raises UserError."""
    for key, value in record.items():
        if key in OF_LINES or key in own:
            continue
        if changes_learning(key):
            _refuse(key, value)
        elif value not in NOTHING:
            unread.append(key)
    context = _context(record)
    systems = [
        (name, given["system"])
        for name, given in (("context.system", context), ("system", record))
        if "system" in given
    ]
    context.pop("system", None)
    for name, text in systems:
        if not isinstance(text, str):
            raise UserError(f"{name}: is no text; give the system text")
        if not text and name == "system":
            continue  # a column that most lines leave empty
        if contents[0].message["role"] != "system":
            contents = [LineMessage({"role": "system", "content": text}, name), *contents]
        elif contents[0].message["content"] != text:
            raise UserError(f"{name}: {contents[0].field} is another system text; give one")
    if "tools" in record:
        context["tools"] = _tools(record["tools"])
    if _learns(record, "") is False:
        contents = [one._replace(learnt=False) for one in contents]
    return Parsed(contents, context, unread)


def _context(record: Mapping[str, Any]) -> dict[str, Any]:
    """Other values that a template may read, as PaddleNLP calls them. Raises UserError."""
    context = record.get("context", {})
    context = {} if context in NOTHING else context
    if not isinstance(context, dict):
        raise UserError('context: is no object; give {"system": …}')
    if taken := OF_CHATS.intersection(context):
        raise UserError(f"context.{min(taken)}: belongs to the line itself, or to the chat template; take it out")
    return _without_nulls(context)


def _tools(given: object) -> list[dict[str, Any]]:
    """Descriptions of tools; many data sets write them as JSON in a text. Raises UserError."""
    if isinstance(given, str):
        given = parse_json(given, "tools") if given.strip() else []
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise UserError("tools: is no list of objects; give a description of each tool")
    return given


def _learns(given: Mapping[str, Any], where: str) -> bool | None:
    """Whether a line or message is learnt, if its masks say so. Raises UserError."""
    contents = {}
    for name in MASKS:
        value = given.get(name)
        if value is None:
            continue
        if type(value) not in (bool, int, float) or value not in (0, 1):
            raise UserError(f"{where}{name}: is {shortened(repr(value))}; give 1 or true (learnt), or 0 or false")
        contents[name] = bool(value)
    if len(set(contents.values())) > 1:
        raise UserError(f"{where}{', '.join(contents)}: contradict each other; give one")
    return next(iter(contents.values()), None)


def _of_messages(given: object, unread: list[str]) -> list[LineMessage]:
    if not isinstance(given, list):
        raise UserError("messages: is no list")
    return [_message(one, f"messages[{place}]", unread) for place, one in enumerate(given)]


def _message(given: object, field: str, unread: list[str]) -> LineMessage:
    message = _without_nulls(given) if isinstance(given, dict) else {}
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
        if key == "tool_calls" and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
            raise UserError(f"{field}.{key}: is no list of objects; give a call in each")
        if not (MEDIA | LOSS).isdisjoint(_words(key)):
            _refuse(key, value, f"{field}.")
        if key not in ("role", "content", *OF_TEMPLATES) and not changes_learning(key) and value not in NOTHING:
            unread.append(f"messages.{key}")
    return LineMessage(message, field, role == ANSWERS and learns is not False)


def _of_pairs(record: Mapping[str, Any]) -> list[LineMessage]:
    for name in ("src", "tgt"):
        if name not in record:
            raise UserError(f'{name}: missing; give {{"src": …, "tgt": …}} or {{"messages": […]}}')
    asked, answers = (_texts(record, name) for name in ("src", "tgt"))
    if len(asked) != len(answers):
        raise UserError(f"src has {len(asked)} texts and tgt {len(answers)}; give an answer to each")
    return _of_turns(asked, answers, _labels(record, len(answers)))


def _labels(record: Mapping[str, Any], answers: int) -> list[bool]:
    """ERNIEKit's `label`: 1 for each answer that is learnt, 0 for any other. Raises UserError."""
    given = record.get("label", [1] * answers)
    labels = given if isinstance(given, list) else [given]
    if len(labels) != answers or not all(type(one) in (bool, int, float) and one in (0, 1) for one in labels):
        raise UserError("label: needs a number for each text of tgt; give 1 (learnt) or 0")
    return list(map(bool, labels))


def _texts(record: Mapping[str, Any], name: str) -> list[str]:
    """A field that is one text or several. Raises UserError."""
    if name not in record:
        raise UserError(f"{name}: missing; give a text, or a list of them")
    texts = record[name] if isinstance(record[name], list) else [record[name]]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{name}: is neither a text nor a list of texts")
    return texts


def _of_turns(asked: Sequence[str], answers: Sequence[str], learnt: Sequence[bool]) -> list[LineMessage]:
    """Questions and their answers, in turn."""
    contents = []
    for number, (question, answer, learns) in enumerate(zip(asked, answers, learnt, strict=True)):
        contents.append(LineMessage({"role": "user", "content": question}, f"src[{number}]"))
        contents.append(LineMessage({"role": ANSWERS, "content": answer}, f"tgt[{number}]", learns))
    return contents
