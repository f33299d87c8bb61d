"""Formats of a line of fine-tuning data.

SFT: PaddleNLP's {"src": …, "tgt": …}, one text each or a list of turns; {"messages": [{"role", "content"}, …]};
ShareGPT's {"conversations": [{"from", "value"}, …]}; Alpaca's {"instruction", "input", "output"}.

DPO: a line is two conversations that differ in their last answer, as PaddleNLP has them (the larger number in `sort` is
the chosen one's), or TRL, UltraFeedback, LLaMA-Factory:

    {"src": ["u1", "u2"], "tgt": ["b1"], "response": ["good", "bad"], "sort": [1, 0]}
    {"prompt": "u1", "chosen": "good", "rejected": "bad"}
    {"chosen": [{"role", "content"}, …], "rejected": [{"role", "content"}, …]}

`prompt` is a text or messages, and may be `conversations` or `instruction`; `chosen` is a text, a message or messages,
which may begin with the prompt.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...base import UserError, shortened
from ...base.reading import parse_json
from .fields import NOTHING, PAIR_REMEDIES, WORDS, LineMessage, Parsed, message_of, of_line, refuse, without_nulls
from .templates import ANSWERS

EXAMPLES = '{"src": …, "tgt": …}, {"messages": […]}, {"conversations": […]} or {"instruction": …, "output": …}'
LISTS = ("messages", "conversations")
CALL = "function_call"
ROLES: dict[str, str] = WORDS["roles"]  # ShareGPT's -> the role of a message
OTHER_PROMPTS = ("prompt", "conversations", "instruction")
ABOUT_ANSWERS = frozenset(WORDS["about_answers"])  # words of keys that describe answers


def conversation_of(record: Mapping[str, Any]) -> Parsed:
    """A line of SFT. Raises UserError."""
    record = without_nulls(record)
    unread: list[str] = []
    format_keys: tuple[str, ...]
    if listed := [name for name in LISTS if name in record]:
        format_keys = (listed[0],)
        contents = _of_messages(record[listed[0]], listed[0], unread)
    elif record.keys() & {"instruction", "output"}:
        format_keys = ("instruction", "input", "output")
        answer = LineMessage({"role": ANSWERS, "content": _one_text(record, "output")}, "output", True)
        contents = [_instruction(record), answer]
    else:
        format_keys = ("src", "tgt", "label")
        contents = _of_pairs(record)
    if not contents or contents[-1].message["role"] != ANSWERS:
        raise UserError(f"{format_keys[0]}: the last one is no answer (role {ANSWERS}), so there is nothing to learn")
    return of_line(record, format_keys, contents, unread)


def pair_of(record: Mapping[str, Any]) -> Parsed:
    """A line of DPO: the conversation up to the last question, then its chosen and rejected answers. Raises
    UserError."""
    record = without_nulls(record)
    if compared := [name for name in ("chosen", "rejected") if record.get(name, "") not in NOTHING]:
        if others := record.keys() & {"src", "tgt", "response", "sort"}:
            raise UserError(f"{', '.join(compared)}: the line has {', '.join(sorted(others))}, too; give one format")
        return _compared(record)
    if not record.keys() & {"response", "sort"} and record.keys() & {"tgt", "output", *LISTS}:
        raise UserError(
            "no two answers: this is SFT data; DPO compares chosen and rejected, or the texts of response; or say "
            "--task sft"
        )
    refuse("messages", record.get("messages", ""), remedies=PAIR_REMEDIES)  # the record may lack src as well
    asked, answered = _texts(record, "src"), [] if record.get("tgt", "") in NOTHING else _texts(record, "tgt")
    if len(asked) != len(answered) + 1:
        raise UserError(f"src has {len(asked)} texts and tgt {len(answered)}; give one src more")
    responses, order = record.get("response"), record.get("sort")
    if (
        not isinstance(responses, list)
        or len(responses) != 2
        or not all(isinstance(value, str) and value.strip() for value in responses)
    ):
        raise UserError("response: needs two answers, each a text that is not empty")
    if not isinstance(order, list) or len(order) != 2 or not all(type(value) in (int, float) for value in order):
        raise UserError("sort: needs two numbers, the larger one for the better answer")
    if order[0] == order[1]:
        raise UserError("sort: says that both answers are as good; give the better one a larger number")
    asked, answered = ([text.strip() for text in texts] for texts in (asked, answered))  # PaddleNLP's rule
    contents = _of_turns(asked[:-1], answered, [False] * len(answered))
    contents.append(LineMessage({"role": "user", "content": asked[-1]}, f"src[{len(answered)}]"))
    for which in sorted(range(2), key=lambda value: -order[value]):
        contents.append(LineMessage({"role": ANSWERS, "content": responses[which].strip()}, f"response[{which}]", True))
    return of_line(record, ("src", "tgt", "response", "sort"), contents, [], PAIR_REMEDIES)


def _compared(record: Mapping[str, Any]) -> Parsed:
    """A line with the fields chosen and rejected. Raises UserError."""
    unread: list[str] = []
    format_keys = ["chosen", "rejected"]
    (*prompt, chosen), (*others, rejected) = (_answered(record, name, unread) for name in format_keys)
    if [message.message for message in prompt] != [message.message for message in others]:
        raise UserError("rejected: differs from chosen before its last message; give the same prompt to both")
    sources = [name for name in OTHER_PROMPTS if name in record]
    if len(sources) > 1:
        raise UserError(f"{sources[1]}: the prompt is in {sources[0]}, too; give one")
    asked = prompt
    for name in sources:
        asked = _asked(record, name, unread)
        format_keys += [name, "input"] if name == "instruction" else [name]
        last = next((message for message in reversed(prompt) if message.message["role"] == "user"), None)
        same = [message.message for message in asked] in (
            [message.message for message in prompt],
            [last.message] if last else [],
        )
        if prompt and not same:
            raise UserError(f"{name}: is not the prompt that chosen begins with; give one")
        asked = prompt or asked
    if not asked or asked[-1].message["role"] == ANSWERS:
        raise UserError("prompt: missing; give a text or messages, or let chosen and rejected begin with it")
    if "messages" in record:
        whole = [message.message for message in _of_messages(record["messages"], "messages", [])]
        if whole != [message.message for message in (*prompt, chosen)]:
            refuse("messages", record["messages"], remedies=PAIR_REMEDIES)
        format_keys.append("messages")
    about = [key for key in record if key not in format_keys and ABOUT_ANSWERS.issuperset(re.split("[-_]", key))]
    learnt = chosen.learnt and rejected.learnt
    contents = [
        *(message._replace(learnt=False) for message in asked),
        *(message._replace(learnt=learnt) for message in (chosen, rejected)),
    ]
    return of_line(record, (*format_keys, *about), contents, unread + about, PAIR_REMEDIES)


def _answered(record: Mapping[str, Any], name: str, unread: list[str]) -> list[LineMessage]:
    """An answer, with the prompt if the field includes it. Raises UserError."""
    answer = record.get(name)
    if isinstance(answer, str) and answer.strip():
        return [LineMessage({"role": ANSWERS, "content": answer}, name, True)]
    listed = [answer] if isinstance(answer, dict) else answer
    contents = _of_messages([] if listed is None or isinstance(listed, str) else listed, name, unread)
    if not contents or contents[-1].message["role"] != ANSWERS:
        raise UserError(f"{name}: needs an answer; give a text that is not empty, or messages of which the last is one")
    return contents


def _asked(record: Mapping[str, Any], name: str, unread: list[str]) -> list[LineMessage]:
    if name == "instruction":
        return [_instruction(record)]
    prompt = record[name]
    return _of_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, name, unread)


def _of_messages(messages: object, name: str, unread: list[str]) -> list[LineMessage]:
    """Messages, with OpenAI's or ShareGPT's names of their fields. Raises UserError."""
    if not isinstance(messages, list):
        raise UserError(f"{name}: is no list; give a list of messages")
    places = [(message, f"{name}[{index}]") for index, message in enumerate(messages)]
    return [message_of(_renamed(message, field), field, unread) for message, field in places]


def _renamed(content: object, field: str) -> object:
    """A message of ShareGPT with the names of OpenAI's. Raises UserError."""
    message = without_nulls(content) if isinstance(content, dict) else {}
    if not message.keys() & {"from", "value"}:
        return content
    if message.keys() & {"role", "content"} or not message.keys() >= {"from", "value"}:
        raise UserError(f"{field}: needs from and value, or role and content; give both of one form")
    source, value = message.pop("from"), message.pop("value")
    if not isinstance(source, str) or source not in ROLES:
        raise UserError(f"{field}.from: {shortened(repr(source))} is unknown; give one of {', '.join(ROLES)}")
    if source != CALL:
        return {**message, "role": ROLES[source], "content": value}
    calls = parse_json(value, f"{field}.value") if isinstance(value, str) else value
    calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
    return {**message, "role": ANSWERS, "content": "", "tool_calls": calls}


def _instruction(record: Mapping[str, Any]) -> LineMessage:
    """Alpaca's question: the input, if there is one, on a line of its own. Raises UserError."""
    texts = [_one_text(record, "instruction"), _one_text(record, "input") if "input" in record else ""]
    return LineMessage({"role": "user", "content": "\n".join(filter(None, texts))}, "instruction")


def _one_text(record: Mapping[str, Any], name: str) -> str:
    text = record.get(name)
    if not isinstance(text, str):
        raise UserError(
            f"{name}: {'is no text' if name in record else 'missing'}; give instruction and output, each a text"
        )
    return text


def _of_pairs(record: Mapping[str, Any]) -> list[LineMessage]:
    for name in ("src", "tgt"):
        if name not in record:
            raise UserError(f"{name}: missing; give {EXAMPLES}")
    asked, answers = (_texts(record, name) for name in ("src", "tgt"))
    if len(asked) != len(answers):
        raise UserError(f"src has {len(asked)} texts and tgt {len(answers)}; give an answer to each")
    return _of_turns(asked, answers, _labels(record, len(answers)))


def _labels(record: Mapping[str, Any], answers: int) -> list[bool]:
    """ERNIEKit's `label`: 1 for each answer that is learnt, 0 for any other. Raises UserError."""
    value = record.get("label", [1] * answers)
    labels = value if isinstance(value, list) else [value]
    if len(labels) != answers or not all(type(label) in (bool, int, float) and label in (0, 1) for label in labels):
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
