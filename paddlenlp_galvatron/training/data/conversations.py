"""Fine-tuning samples: lines of JSON as conversations, and conversations as tokens of which the answers are learnt.

A line is PaddleNLP's {"src": …, "tgt": …}, one text each or a list of turns, or {"messages": [{"role", "content"}, …]}.
In DPO a line is two conversations that differ in their last answer; the larger number in `sort` is the chosen one's:

    {"src": ["u1", "u2"], "tgt": ["b1"], "response": ["good", "bad"], "sort": [1, 0]}

Whatever is wrong with lines is told at once, by file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ...base.errors import UserError
from ...base.reading import parse_json
from .templates import ANSWERS, Message, Template
from .text_files import decoded, read_lines
from .tokenizer import encode

MOST_FAULTS = 20  # lines that are named in one error
BATCH_LINES = 1000  # tokenised at once: enough for the tokenizer's threads, little memory
Tokens = NDArray[np.int64]
Parsed = tuple[list[Message], Mapping[str, Any]]
PROMPT_SHARE = 4  # a pair that is too long keeps at most this part of a row of its prompt, twice, and its answers


class Line(NamedTuple):
    """A conversation, and where it stands."""

    file: int  # of the files, which one
    number: int
    messages: list[Message]
    context: Mapping[str, Any]  # other variables of a chat_template.json


@dataclass(frozen=True)
class Sample:
    """Tokens of a line: a learnt token as it is, any other as ~token, which is below 0."""

    line: Line
    tokens: Tokens
    unlearnt: int  # answers that are not learnt

    @property
    def learns(self) -> bool:
        """Whether any token is learnt; nothing before the first could predict it."""
        return bool((self.tokens[1:] >= 0).any())


@dataclass(frozen=True)
class Encoder:
    """Conversations as tokens, by PaddleNLP's rules of what is cut where."""

    tokenizer: Tokenizer
    template: Template | None
    end: int  # token behind an answer, where there is no template
    src_length: int  # most tokens of what is asked
    length: int  # most tokens in all
    all_learnt: bool = False

    def samples(self, files: Sequence[Path]) -> Iterator[Sample]:
        """Samples of all lines of the files. Raises UserError with a line for each fault, up to MOST_FAULTS."""
        faults: list[str] = []
        batch: list[Line] = []
        for line in _lines(files, faults, self._conversation):
            batch.append(line)
            if len(batch) == BATCH_LINES:
                yield from self._encoded(batch, files, faults)
                batch = []
            if len(faults) >= MOST_FAULTS:
                break
        yield from self._encoded(batch, files, faults)
        if faults:
            raise UserError(faults[:MOST_FAULTS])

    def _encoded(self, lines: Sequence[Line], files: Sequence[Path], faults: list[str]) -> Iterator[Sample]:
        """Encodes a batch. Yields nothing once there are faults: the rest is read to find more of them."""
        texts: list[list[str]] = []
        good: list[tuple[Line, int]] = []
        for line in lines:
            try:
                parts, unlearnt = self._texts(line)
            except UserError as error:
                faults += [f"{files[line.file]}: line {line.number}: {fault}" for fault in error.faults]
                continue
            texts.append(parts)
            good.append((line, unlearnt))
        if faults:
            return
        ids = iter(encode(self.tokenizer, [text for parts in texts for text in parts]))
        for (line, unlearnt), parts in zip(good, texts, strict=True):
            yield from self._samples(line, unlearnt, [next(ids) for _ in parts])

    def _conversation(self, record: Mapping[str, Any]) -> tuple[list[Message], Mapping[str, Any]]:
        """Messages of a line, and its context. Raises UserError."""
        messages = _messages(record["messages"]) if "messages" in record else _of_pairs(record)
        if not messages or messages[-1]["role"] != ANSWERS:
            raise UserError(f"messages: the last one is no answer (role {ANSWERS}), so there is nothing to learn")
        return messages, context_of(record)

    def _samples(self, line: Line, unlearnt: int, ids: list[list[int]]) -> list[Sample]:
        """Makes the samples of a line from the tokens of its texts."""
        return [Sample(line, self._cut(ids), unlearnt)]

    def _texts(self, line: Line) -> tuple[list[str], int]:
        """Texts of a conversation that are tokenised one by one: the system text, and prompt and answer of each turn;
        and the number of answers that are not learnt. Raises UserError."""
        if self.template is None:
            if [message["role"] for message in line.messages] != ["user", ANSWERS]:
                raise UserError(
                    "several turns, or a system text, need a chat template, and the tokenizer has none; name one: "
                    "--chat_template"
                )
            return ["", *(message["content"] for message in line.messages)], 0
        parts = self.template.parts(line.messages, line.context)
        return [parts.system, *(text for turn in parts.turns for text in turn)], parts.unlearnt

    def _cut(self, ids: list[list[int]]) -> Tokens:
        """A conversation's tokens, as far as they fit: whole turns from the last one backwards, at least one, of which
        the end is cut."""
        system, turns = ids[0], list(zip(ids[1::2], ids[2::2], strict=True))
        if self.template is None:
            [(asked, answer)] = turns
            asked = [*self._in_front, *asked[-max(self.src_length - len(self._in_front), 1) :]]
            room = self.length - len(asked)
            kept = [(asked, [*answer, self.end][:room] if room > 0 else [])]
        else:
            room, kept = self.length - len(system), []
            for asked, answer in reversed(turns):
                if len(asked) + len(answer) > room:
                    if not kept:
                        asked = asked[: max(self.src_length - len(system), 0)]
                        kept = [(asked, answer[: max(room - len(asked), 0)])]
                    break
                kept.insert(0, (asked, answer))
                room -= len(asked) + len(answer)
        pieces = [(np.array(system, np.int64), False)]
        for asked, answer in kept:
            pieces += [(np.array(asked, np.int64), False), (np.array(answer, np.int64), True)]
        whole = np.concatenate([part if learnt or self.all_learnt else ~part for part, learnt in pieces])
        return whole[: self.length]

    @property
    def _in_front(self) -> list[int]:
        """Tokens that the tokenizer puts in front of a text."""
        encoding = self.tokenizer.encode("a")
        mask = [*encoding.special_tokens_mask, 0]
        found: list[int] = encoding.ids[: mask.index(0)]
        return found


def _lines(
    files: Sequence[Path], faults: list[str], conversation: Callable[[Mapping[str, Any]], Parsed]
) -> Iterator[Line]:
    """Conversations of the files; what is wrong with a line goes to `faults`. Raises UserError for a file."""
    for which, path in enumerate(files):
        for number, content in read_lines(path):
            if not content.strip():
                continue
            try:
                yield Line(which, number, *conversation(_record(content)))
            except UserError as error:
                faults.append(f"{path}: line {number}: {error.faults[0]}")


def _record(content: str) -> Mapping[str, Any]:
    """The object that a line holds. Raises UserError."""
    record = parse_json(decoded(content, None), "one JSON object a line")
    if not isinstance(record, dict):
        raise UserError('is no JSON object; give {"src": …, "tgt": …} or {"messages": […]}')
    return record


def _messages(given: object) -> list[Message]:
    if not isinstance(given, list):
        raise UserError("messages: is no list")
    found = []
    for place, one in enumerate(given):
        role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"messages[{place}]: needs a role and a content, both texts")
        found.append({"role": role, "content": content})
    return found


def _of_pairs(record: Mapping[str, Any]) -> list[Message]:
    for name in ("src", "tgt"):
        if name not in record:
            raise UserError(f'{name}: missing; give {{"src": …, "tgt": …}} or {{"messages": […]}}')
    asked, answers = (texts_of(record, name) for name in ("src", "tgt"))
    if len(asked) != len(answers):
        raise UserError(f"src has {len(asked)} texts and tgt {len(answers)}; give an answer to each")
    return of_turns(asked, answers)


def context_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Other values that a template may read. Raises UserError."""
    context = record.get("context") or {}
    if not isinstance(context, dict):
        raise UserError('context: is no object; give {"system": …}')
    return context


def texts_of(record: Mapping[str, Any], name: str) -> list[str]:
    """A field that is one text or several. Raises UserError."""
    if name not in record:
        raise UserError(f"{name}: missing; give a text, or a list of them")
    texts = record[name] if isinstance(record[name], list) else [record[name]]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{name}: is neither a text nor a list of texts")
    return texts


def of_turns(asked: Sequence[str], answers: Sequence[str]) -> list[Message]:
    """Questions and their answers, in turn."""
    return [
        {"role": role, "content": text}
        for turn in zip(asked, answers, strict=True)
        for role, text in zip(("user", ANSWERS), turn, strict=True)
    ]


@dataclass(frozen=True)
class PairEncoder(Encoder):
    """A line becomes two samples: the chosen answer's and the rejected one's. Both stand in one row, each behind a
    prompt of its own, so that positions and attention are those of a conversation alone. `src_length`: most tokens of a
    prompt, where a pair is longer than `length`."""

    def _conversation(self, record: Mapping[str, Any]) -> tuple[list[Message], Mapping[str, Any]]:
        turns, answers = _parts(record)
        return [*turns, *({"role": ANSWERS, "content": text} for text in answers)], context_of(record)

    def _texts(self, line: Line) -> tuple[list[str], int]:
        """Texts of both conversations in turn; earlier answers are not learnt, whatever the template does."""
        *before, chosen, rejected = line.messages
        both = (line._replace(messages=[*before, one]) for one in (chosen, rejected))
        told = [super(PairEncoder, self)._texts(one)[0] for one in both]
        if len(told[0]) != len(told[1]):
            raise UserError("the chat template tells the turns before by the answer that follows; name another one")
        return [text for parts in told for text in parts], 0

    def _samples(self, line: Line, unlearnt: int, ids: list[list[int]]) -> list[Sample]:
        half = len(ids) // 2
        conversations = [ids[:half], ids[half:]]
        answers = [self._answer(one[-1]) for one in conversations]
        asked = [self._asked(one[-2]) for one in conversations]
        system = conversations[0][0]
        prompts = [[*system, *one] for one in asked]
        left = self._room - sum(map(len, (*prompts, *answers)))
        earlier: list[int] = []
        for turn in range(half - 4, 0, -2):  # whole turns from the last one backwards, while both have room for them
            before = [*conversations[0][turn], *conversations[0][turn + 1], *earlier]
            if 2 * len(before) > left:
                break
            earlier = before
        prompts = [[*system, *earlier, *one] for one in asked]
        if left < 0:
            prompts, answers = self._fitted(prompts, answers)
        return [
            Sample(line, np.concatenate([~np.array(prompt, np.int64), np.array(answer, np.int64)]), 0)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _fitted(self, prompts: list[list[int]], answers: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """By PaddleNLP's rule: the prompt loses its beginning; if that is not enough, answers their ends, in proportion
        to their lengths."""
        most = max(min(self.src_length, self.length // PROMPT_SHARE), 1)
        prompts = [prompt[-most:] for prompt in prompts]
        room = self._room - sum(map(len, prompts))
        sizes = [len(answer) for answer in answers]
        if sum(sizes) > room:
            first = min(max(sizes[0] * room // sum(sizes), 1), room - 1)
            answers = [answers[0][:first], answers[1][: room - first]]
        return prompts, answers

    @property
    def _room(self) -> int:
        """Tokens of both together: each has a place in the row but for the last, which predicts nothing."""
        return self.length + 2

    def _answer(self, ids: list[int]) -> list[int]:
        return ids if self.template else [*ids, self.end]

    def _asked(self, ids: list[int]) -> list[int]:
        return ids if self.template else [*self._in_front, *ids]


def _parts(record: Mapping[str, Any]) -> tuple[list[Message], list[str]]:
    """The conversation up to the last question, and the chosen and the rejected answer to it. Raises UserError."""
    asked, answered = texts_of(record, "src"), texts_of(record, "tgt") if record.get("tgt") else []
    if len(asked) != len(answered) + 1:
        raise UserError(f"src has {len(asked)} texts and tgt {len(answered)}; give one src more")
    given, order = record.get("response"), record.get("sort")
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(one, str) and one.strip() for one in given):
        raise UserError("response: needs two answers, each a text that is not empty")
    if not isinstance(order, list) or len(order) != 2 or not all(type(one) in (int, float) for one in order):
        raise UserError("sort: needs two numbers, the larger one beside the better answer")
    if order[0] == order[1]:
        raise UserError("sort: says that both answers are as good; give the better one a larger number")
    better = int(order[1] > order[0])
    asked, answered = ([text.strip() for text in texts] for texts in (asked, answered))  # as PaddleNLP does
    turns = of_turns(asked[:-1], answered)
    return [*turns, {"role": "user", "content": asked[-1]}], [given[better].strip(), given[1 - better].strip()]
