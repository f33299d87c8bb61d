"""Fine-tuning samples: conversations as tokens of which the answers are learnt.

A conversation is tokenised as one text, so its tokens are those of transformers' `apply_chat_template`; learnt tokens
is known by the characters that a token stands for. All that is wrong with lines is reported at once, by file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from ...base.errors import UserError
from ...base.reading import parse_json
from .fields import LineMessage, Parsed, conversation_of, pair_of, require_rendered
from .templates import ANSWERS, Rendered, Template, Turn
from .text_files import decoded, read_lines
from .tokenizer import encodings

MOST_FAULTS = 20  # kinds of faults that are named in one error
BATCH_LINES = 1000  # tokenised at once: enough for the tokenizer's threads, little memory
Tokens = NDArray[np.int64]
PROMPT_SHARE = 4  # a pair that is too long keeps at most this part of a row of its prompt, twice, and its answers


class LineFaults(dict[tuple[int, str], tuple[int, int]]):
    """Faults of lines, equal ones of a file as one: (which file, the fault) -> its first line, and how many have it."""

    def add(self, file: int, line: int, fault: str) -> None:
        first, count = self.get((file, fault), (line, 0))
        self[file, fault] = min(first, line), count + 1

    def named(self, files: Sequence[Path]) -> list[str]:
        """One text for each, in the order of the lines."""
        found = sorted((file, first, fault, count - 1) for (file, fault), (first, count) in self.items())
        return [
            f"{files[file]}: line {first}: {fault}"
            + (f" (and {more} more {'lines' if more > 1 else 'line'})" if more else "")
            for file, first, fault, more in found[:MOST_FAULTS]
        ]


class Line(NamedTuple):
    """A conversation, and where it stands."""

    file: int  # of the files, which one
    number: int
    contents: list[LineMessage]
    context: Mapping[str, Any]  # other values that a chat template reads
    unread: Sequence[str] = ()  # its keys that have no meaning here

    @property
    def masked(self) -> bool:
        """Whether its fields say that nothing is learnt."""
        return not any(one.learnt for one in self.contents)


@dataclass(frozen=True)
class Sample:
    """Tokens of a line: a learnt token as it is, any other as ~token, which is below 0."""

    line: Line
    tokens: Tokens
    unlearnt: int  # answers that are not learnt, as the template changes them
    unopened: int = 0  # answers that lack the thoughts which the template's generation prompt opens

    @property
    def learns(self) -> bool:
        """Whether any token is learnt; nothing before the first could predict it."""
        return bool((self.tokens[1:] >= 0).any())


class Tokenised(NamedTuple):
    """A conversation's tokens, signed as a sample's, and where its parts begin."""

    tokens: Tokens
    system: int  # number of those of the system text
    turns: list[tuple[int, int, int]]  # where the prompt begins, and the answer, and where it ends

    @property
    def unlearnt(self) -> Tokens:
        """The tokens, none of them learnt."""
        return np.where(self.tokens < 0, self.tokens, ~self.tokens)


@dataclass(frozen=True)
class Encoder:
    """Conversations as tokens, by PaddleNLP's rules of truncation.

    A token is learnt if any of its characters stands in an answer that is learnt, as transformers counts; where the
    template has `{% generation %}`, within its marks.
    """

    tokenizer: Tokenizer
    template: Template | None
    end: int  # token behind an answer, where there is no template
    src_length: int  # most tokens of the prompt
    length: int  # most tokens in all
    all_learnt: bool = False

    def samples(self, files: Sequence[Path]) -> Iterator[Sample]:
        """Samples of all lines of the files. Raises UserError with a line for each kind of fault, up to MOST_FAULTS."""
        faults = LineFaults()
        batch: list[Line] = []
        for line in _lines(files, faults, self._parsed):
            batch.append(line)
            if len(batch) == BATCH_LINES:
                yield from self._encoded(batch, faults)
                batch = []
            if len(faults) >= MOST_FAULTS:
                break
        yield from self._encoded(batch, faults)
        if faults:
            raise UserError(faults.named(files))

    def _encoded(self, lines: Sequence[Line], faults: LineFaults) -> Iterator[Sample]:
        """Encodes a batch. Yields nothing once there are faults: the rest is read to find more of them."""
        good: list[tuple[Line, list[Rendered]]] = []
        for line in lines:
            try:
                good.append((line, self._rendered(line)))
            except UserError as error:
                faults.add(line.file, line.number, error.faults[0])
        if faults:
            return
        texts = [text for _, conversations in good for one in conversations for text in self._pieces(one)]
        encoded = iter(encodings(self.tokenizer, texts))
        for line, conversations in good:
            tokenised = [
                self._tokenised(contents, one, encoded)
                for contents, one in zip(self._conversations(line), conversations, strict=True)
            ]
            yield from self._samples(line, conversations, tokenised)

    def _parsed(self, record: Mapping[str, Any]) -> Parsed:
        """The conversation of a line. Raises UserError."""
        return conversation_of(record)

    def _conversations(self, line: Line) -> list[list[LineMessage]]:
        """The conversations of a line."""
        return [line.contents]

    def _samples(self, line: Line, texts: list[Rendered], tokenised: list[Tokenised]) -> list[Sample]:
        """Makes the samples of a line from the tokens of its conversations."""
        return [Sample(line, self._cut(tokenised[0]), texts[0].unlearnt, texts[0].unopened)]

    def _rendered(self, line: Line) -> list[Rendered]:
        """Texts of the conversations. Raises UserError: there are none, or they would lack content of the line."""
        return [self._text(contents, line.context) for contents in self._conversations(line)]

    def _text(self, contents: Sequence[LineMessage], context: Mapping[str, Any]) -> Rendered:
        messages = [one.message for one in contents]
        if self.template is None:
            if context or [(one["role"], *one) for one in messages] != [
                (role, "role", "content") for role in ("user", ANSWERS)
            ]:
                raise UserError(
                    "several turns, or a system text, need a chat template, as do tools and other fields of a message, "
                    "and the tokenizer has none; name one: galvatron train --chat_template"
                )
            asked, answer = (message["content"] for message in messages)
            end = len(asked + answer) + 1  # the end token counts as a character
            return Rendered(asked + answer, 0, [Turn(len(asked), end, 1)])
        text = self.template.rendered(messages, context)
        require_rendered(self.template, contents, context)
        return text

    def _pieces(self, conversation: Rendered) -> list[str]:
        """The texts that are tokenised one by one: all in one, but for PaddleNLP's kinds of text."""
        if not self._apart:
            return [conversation.text]
        borders = [0, conversation.system, *(border for turn in conversation.turns for border in turn[:2])]
        return [conversation.text[begin:stop] for begin, stop in pairwise(borders)]

    @cached_property
    def _apart(self) -> bool:
        """Whether prompts and answers are tokenised apart, as PaddleNLP does: without a template, and by its
        chat_template.json, unless the tokenizer puts a blank in front of each text: no answer begins with one."""
        return self.template is None or (self.template.apart and not _adds_blank(self.tokenizer))

    def _tokenised(
        self, contents: Sequence[LineMessage], conversation: Rendered, encoded: Iterator[Encoding]
    ) -> Tokenised:
        ids, spans, begin = list[int](), list[tuple[int, int]](), 0
        for text in self._pieces(conversation):
            encoding = next(encoded)
            ids += encoding.ids
            spans += [(begin + start, begin + stop) for start, stop in encoding.offsets]
            begin += len(text)
        if self.template is None:
            ids.append(self.end)
            spans.append((begin, begin + 1))
        tokens, (starts, stops) = np.array(ids, np.int64), np.array(spans, np.int64).reshape(-1, 2).T
        learnt = np.full(len(tokens), self.all_learnt and any(one.learnt for one in contents))
        for turn in conversation.turns:
            marked = [(turn.start, turn.stop)] if conversation.marked is None else conversation.marked
            for start, stop in marked:
                inside = (stops > max(start, turn.start)) & (starts < min(stop, turn.stop))
                learnt = learnt | inside if contents[turn.place].learnt else learnt & ~inside
        return Tokenised(np.where(learnt, tokens, ~tokens), *_places(conversation, starts, stops))

    def _cut(self, conversation: Tokenised) -> Tokens:
        """A conversation's tokens, as far as they fit: whole turns from the last one backwards, at least one, of which
        the end is cut."""
        tokens, system, turns = conversation
        if self.template is None:
            [(begin, answer, _)] = turns
            most = max(self.src_length - len(self._in_front), 1)
            front = ~self._in_front if (tokens[:answer] >= 0).any() else self._in_front
            kept = [front, tokens[max(answer - most, begin) :]]
        else:
            first, room = len(turns), self.length - system
            while first and turns[-1][2] - turns[first - 1][0] <= room:
                first -= 1
            if first < len(turns):
                kept = [tokens[:system], tokens[turns[first][0] :]]
            else:
                begin, answer, _ = turns[-1]
                asked = max(min(answer - begin, self.src_length - system), 0)
                kept = [tokens[:system], tokens[begin : begin + asked], tokens[answer:]]
        cut: Tokens = np.concatenate(kept)[: self.length]
        return cut

    @cached_property
    def _in_front(self) -> Tokens:
        """Tokens that the tokenizer puts in front of a text, where no template says what stands there; unlearnt."""
        if self.template is not None:
            return np.zeros(0, np.int64)
        encoding = self.tokenizer.encode("a")
        mask = [*encoding.special_tokens_mask, 0]
        return ~np.array(encoding.ids[: mask.index(0)], np.int64)


def _adds_blank(tokenizer: Tokenizer) -> bool:
    """Whether a text gets something in front, as SentencePiece's do."""
    text = tokenizer.normalizer.normalize_str("a") if tokenizer.normalizer else "a"
    parts = tokenizer.pre_tokenizer.pre_tokenize_str(text) if tokenizer.pre_tokenizer else [(text, None)]
    return "".join(part for part, _ in parts) != "a"


def _places(
    conversation: Rendered, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[int, list[tuple[int, int, int]]]:
    """How many tokens the system text has, and where the turns stand. A token at a border is the answer's."""
    starts, stops = np.maximum.accumulate(starts), np.maximum.accumulate(stops)
    begin = system = int(np.searchsorted(starts, conversation.system))
    turns = []
    for turn in conversation.turns:
        answer = max(int(np.searchsorted(stops, turn.start, "right")), begin)
        end = max(int(np.searchsorted(starts, turn.stop)), answer)
        turns.append((begin, answer, end))
        begin = end
    return system, turns


def _lines(
    files: Sequence[Path], faults: LineFaults, conversation: Callable[[Mapping[str, Any]], Parsed]
) -> Iterator[Line]:
    """Conversations of the files; faults of a line go to `faults`. Raises UserError for a file."""
    for which, path in enumerate(files):
        for number, content in read_lines(path):
            if not content.strip():
                continue
            try:
                yield Line(which, number, *conversation(_record(content)))
            except UserError as error:
                faults.add(which, number, error.faults[0])


def _record(content: str) -> Mapping[str, Any]:
    """The object that a line holds. Raises UserError."""
    record = parse_json(decoded(content, None), "one JSON object a line")
    if not isinstance(record, dict):
        raise UserError('is no JSON object; give {"src": …, "tgt": …} or {"messages": […]}')
    return record


@dataclass(frozen=True)
class PairEncoder(Encoder):
    """A line becomes two samples: the chosen answer's and the rejected one's. Both stand in one row, each behind a
    prompt of its own, so that positions and attention are those of a conversation alone. `src_length`: most tokens of a
    prompt, where a pair is longer than `length`."""

    def _parsed(self, record: Mapping[str, Any]) -> Parsed:
        return pair_of(record)

    def _conversations(self, line: Line) -> list[list[LineMessage]]:
        *before, chosen, rejected = line.contents
        return [[*before, chosen], [*before, rejected]]

    def _rendered(self, line: Line) -> list[Rendered]:
        both = super()._rendered(line)
        before = [one.text[: one.turns[-2].stop if len(one.turns) > 1 else one.system] for one in both]
        if before[0] != before[1]:
            raise UserError("the chat template renders earlier turns differently for each answer; name another one")
        return both

    def _samples(self, line: Line, texts: list[Rendered], tokenised: list[Tokenised]) -> list[Sample]:
        """Earlier answers are not trained on, under any template."""
        first, *_ = tokenised
        lasts = [one.turns[-1] for one in tokenised]
        answers = [one.tokens[answer:stop] for one, (_, answer, stop) in zip(tokenised, lasts, strict=True)]
        asked = [one.unlearnt[begin:answer] for one, (begin, answer, _) in zip(tokenised, lasts, strict=True)]
        system = np.concatenate([self._in_front, first.unlearnt[: first.system]])
        left = self._room - 2 * len(system) - sum(map(len, (*asked, *answers)))
        earliest = last = lasts[0][0]
        for begin, _, _ in reversed(first.turns[:-1]):  # whole turns, while both prompts have room for them
            if 2 * (last - begin) > left:
                break
            earliest = begin
        prompts = [np.concatenate([system, first.unlearnt[earliest:last], one]) for one in asked]
        if left < 0:
            prompts, answers = self._fitted(prompts, answers)
        return [
            Sample(line, np.concatenate([prompt, answer]), 0, text.unopened)
            for prompt, answer, text in zip(prompts, answers, texts, strict=True)
        ]

    def _fitted(self, prompts: list[Tokens], answers: list[Tokens]) -> tuple[list[Tokens], list[Tokens]]:
        """Truncate by PaddleNLP's rule: the prompt loses its beginning; if that is not enough, answers their ends, in
        proportion to their lengths."""
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
