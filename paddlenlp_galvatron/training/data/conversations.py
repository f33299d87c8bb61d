"""Fine-tuning samples: conversations as tokens of which the answers are learnt.

A conversation is tokenised as one text, so its tokens are those of transformers' `apply_chat_template`; the characters
of a token decide whether it is learnt. All faults of lines are reported at once, by file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from json import dumps, loads
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from ...base.errors import UserError
from ...base.reading import parse_json
from .fields import LineMessage, Parsed, in_its_form, require_rendered
from .formats import EXAMPLES, conversation_of, pair_of
from .templates import ANSWERS, Rendered, Template, Turn
from .text_files import decoded, read_lines
from .tokenizer import encodings, tokenising

MOST_FAULTS = 20  # kinds of faults in one error
BATCH_LINES, BATCH_CHARACTERS = 1000, 1 << 20  # per batch: enough for the tokenizer's threads, little memory
Tokens = NDArray[np.int64]
PROMPT_SHARE = 4  # divisor of a row: largest prompt of a pair that is too long, which appears twice


class LineFaults(dict[tuple[int, str], tuple[int, int]]):
    """Faults of lines, merged per file: (file index, fault) -> its first line and the number of lines."""

    def add(self, file: int, line: int, fault: str) -> None:
        first, count = self.get((file, fault), (line, 0))
        self[file, fault] = min(first, line), count + 1

    def named(self, files: Sequence[Path]) -> list[str]:
        """One text per fault, in the order of the lines."""
        rows = sorted((file, first, fault, count - 1) for (file, fault), (first, count) in self.items())
        return [
            f"{files[file]}: line {first}: {fault}"
            + (f" (and {more} more {'lines' if more > 1 else 'line'})" if more else "")
            for file, first, fault, more in rows[:MOST_FAULTS]
        ]


class Line(NamedTuple):
    """A conversation and its place in the data."""

    file: int  # index of the file
    number: int
    contents: list[LineMessage]
    context: Mapping[str, Any]  # other values that a chat template reads
    unread: Sequence[str] = ()  # its keys without meaning here
    characters: int = 0  # characters of it in its file

    @property
    def masked(self) -> bool:
        """Whether its fields exclude every answer from the loss."""
        return not any(content.learnt for content in self.contents)


class Losses(NamedTuple):
    """Numbers of a line's parts that are missing in its sample."""

    unlearnt: int = 0  # answers without loss: the template changes them when messages follow
    uncalled: int = 0  # answers with tool calls without loss, for the same reason
    unopened: int = 0  # answers without the thoughts that the generation prompt opens, which begin inside it
    shortened: int = 0  # removed tokens of the texts before its last answer
    unended: int = 0  # removed tokens of its last answer
    dropped: int = 0  # removed turns


@dataclass(frozen=True)
class Sample:
    """Tokens of a line: a learnt token unchanged, any other as ~token, which is negative."""

    line: Line
    tokens: Tokens
    losses: Losses

    @property
    def learns(self) -> bool:
        """Whether any token but the first is learnt; the first has no predictor."""
        return bool((self.tokens[1:] >= 0).any())


class Tokenised(NamedTuple):
    """A conversation's tokens, with signs as in a sample, and the starts of its parts."""

    tokens: Tokens
    system: int  # tokens of the system text
    turns: list[tuple[int, int, int]]  # start of the prompt, start and end of the answer
    texts: NDArray[np.int64]  # positions of messages' tokens in the last prompt; the others are the template's

    @property
    def unlearnt(self) -> Tokens:
        """The tokens, without learnt tokens."""
        return np.where(self.tokens < 0, self.tokens, ~self.tokens)


@dataclass(frozen=True)
class Encoder:
    """Conversations as tokens: as many whole turns as fit, as in PaddleNLP. A prompt that is too long loses the start
    of its texts, never the template's marks or the system text.

    A token is learnt if any of its characters is in a learnt answer, as in transformers; with `{% generation %}` in the
    template, inside its marks.
    """

    tokenizer: Tokenizer
    template: Template | None
    end: int  # token after an answer without a template
    src_length: int  # most tokens of the prompt
    length: int  # most tokens in total
    all_learnt: bool = False
    together: ClassVar = 1  # samples of a line, which share a row
    parsed: ClassVar = staticmethod(conversation_of)  # the conversation of a line; raises UserError

    def samples(self, files: Sequence[Path]) -> Iterator[Sample]:
        """Samples of all lines of the files. Raises UserError with a line for each kind of fault, up to MOST_FAULTS."""
        faults = LineFaults()
        batch: list[Line] = []
        characters = 0
        for line in _lines(files, faults, self.parsed):
            batch.append(line)
            characters += line.characters
            if len(batch) == BATCH_LINES or characters > BATCH_CHARACTERS:
                yield from self._limited(files, batch, faults)
                batch, characters = [], 0
            if len(faults) >= MOST_FAULTS:
                break
        if batch:
            yield from self._limited(files, batch, faults)
        if faults:
            raise UserError(faults.named(files))

    def _limited(self, files: Sequence[Path], lines: Sequence[Line], faults: LineFaults) -> Iterator[Sample]:
        """`_encoded` in a process with limits. Raises UserError."""

        def work() -> bytes:
            samples = list(self._encoded(lines, faults))
            header = [list(faults.items()), [(len(sample.tokens), *sample.losses) for sample in samples]]
            return dumps(header).encode() + b"\n" + b"".join(sample.tokens.tobytes() for sample in samples)

        where = f"{files[lines[0].file]}: line {lines[0].number} and {len(lines) - 1} more"
        done = tokenising(work, f"{where}: the chat template or the tokenizer", sum(line.characters for line in lines))
        header, _, tokens = done.partition(b"\n")
        line_faults, samples = loads(header)
        faults.update({(file, fault): (first, count) for (file, fault), (first, count) in line_faults})
        begin, size = 0, np.dtype(np.int64).itemsize
        for number, (length, *losses) in enumerate(samples):
            ids = np.frombuffer(tokens, np.int64, length, begin)
            yield Sample(lines[number // self.together], ids, Losses(*losses))
            begin += length * size

    def _encoded(self, lines: Sequence[Line], faults: LineFaults) -> Iterator[Sample]:
        """Encodes a batch. Once there are faults it yields nothing and reads on only to find more."""
        good: list[tuple[Line, list[Rendered]]] = []
        for line in lines:
            try:
                good.append((line, self._rendered(line)))
            except UserError as error:
                faults.add(line.file, line.number, error.faults[0])
        if faults:
            return
        texts = [text for _, conversations in good for each in conversations for text in self._pieces(each)]
        encoded = iter(encodings(self.tokenizer, texts))
        for line, conversations in good:
            tokenised = [
                self._tokenised(contents, conversation, encoded)
                for contents, conversation in zip(self._conversations(line), conversations, strict=True)
            ]
            yield from self._samples(line, conversations, tokenised)

    def _conversations(self, line: Line) -> list[list[LineMessage]]:
        """The conversations of a line."""
        return [line.contents]

    def _samples(self, line: Line, texts: list[Rendered], tokenised: list[Tokenised]) -> list[Sample]:
        """Makes the samples of a line from the tokens of its conversations."""
        return [Sample(line, *self._cut(tokenised[0], Losses(**texts[0].losses)))]

    def _rendered(self, line: Line) -> list[Rendered]:
        """Texts of the conversations. Raises UserError if there are none or they would lack content of the line."""
        return [self._text(contents, line.context) for contents in self._conversations(line)]

    def _text(self, contents: Sequence[LineMessage], context: Mapping[str, Any]) -> Rendered:
        messages = [content.message for content in contents]
        if self.template is None:
            if context or [(message["role"], *message) for message in messages] != [
                (role, "role", "content") for role in ("user", ANSWERS)
            ]:
                raise UserError(
                    "several turns, or a system text, need a chat template, as do tools and other fields of a message, "
                    "and the tokenizer has none; name one: galvatron train --chat_template"
                )
            asked, answer = (message["content"] for message in messages)
            end = len(asked + answer) + 1  # the end token is one character
            return Rendered(asked + answer, 0, [Turn(len(asked), end, 1)])
        messages = in_its_form(self.template, messages, context)
        try:
            text = self.template.rendered(messages, context)
        except UserError as error:
            empty = next((content.field for content in contents if "content" not in content.message), None)
            raise UserError(f'{error}; {empty} has no content: try "" there') if empty else error from None
        rewritten = [content._replace(message=message) for content, message in zip(contents, messages, strict=True)]
        require_rendered(self.template, rewritten, context)
        return text

    def _pieces(self, conversation: Rendered) -> list[str]:
        """The texts to tokenise separately: a single text, except for PaddleNLP's kinds of text."""
        if not self._apart:
            return [conversation.text]
        borders = [0, conversation.system, *(border for turn in conversation.turns for border in turn[:2])]
        return [conversation.text[begin:stop] for begin, stop in pairwise(borders)]

    @cached_property
    def _apart(self) -> bool:
        """Whether prompts and answers are tokenised separately, as in PaddleNLP: without a template, or with its
        chat_template.json, unless the tokenizer adds a space before each text, as no answer begins with one."""
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
        learnt = np.full(len(tokens), self.all_learnt and any(content.learnt for content in contents))
        for turn in conversation.turns:
            marked = [(turn.start, turn.stop)] if conversation.marked is None else conversation.marked
            for start, stop in marked:
                inside = (stops > max(start, turn.start)) & (starts < min(stop, turn.stop))
                learnt = learnt | inside if contents[turn.place].learnt else learnt & ~inside
        messages = [content.message for content in contents]
        inside = [(starts >= start) & (stops <= stop) for start, stop in conversation.asked(messages, -1)]
        texts = np.flatnonzero(np.any(inside, axis=0))
        return Tokenised(np.where(learnt, tokens, ~tokens), *_places(conversation, starts, stops), texts)

    def _cut(self, conversation: Tokenised, losses: Losses) -> tuple[Tokens, Losses]:
        """A conversation's tokens that fit: whole turns from the last backwards. A single turn that is too long loses
        the start of the texts before its answer, and the end of the answer."""
        tokens, system, turns, _ = conversation
        first = len(turns)
        while self.template and first and turns[-1][2] - turns[first - 1][0] <= self.length - system:
            first -= 1
        if first < len(turns):
            return np.concatenate([tokens[:system], tokens[turns[first][0] :]]), losses._replace(dropped=first)
        begin, answer, _ = turns[-1]
        front = ~self._in_front if (tokens[:answer] >= 0).any() else self._in_front
        lost = self._lost(conversation, len(front) + system + answer - begin - self.src_length, self.src_length)
        kept = np.concatenate([front, tokens[:system], np.delete(tokens, lost)[begin:]])
        unended = max(len(kept) - self.length, 0)
        losses = losses._replace(shortened=len(lost), unended=unended, dropped=first - 1)
        return kept[: self.length], losses

    @staticmethod
    def _lost(conversation: Tokenised, excess: int, most: int) -> NDArray[np.int64]:
        """Positions of tokens to remove from a last prompt that is too long; half of `most` is always kept."""
        return conversation.texts[: max(min(excess, len(conversation.texts) - most // 2), 0)]

    @cached_property
    def _in_front(self) -> Tokens:
        """Tokens that the tokenizer adds before a text without a template; not learnt."""
        if self.template is not None:
            return np.zeros(0, np.int64)
        encoding = self.tokenizer.encode("a")
        mask = [*encoding.special_tokens_mask, 0]
        return ~np.array(encoding.ids[: mask.index(0)], np.int64)


def _adds_blank(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer adds a prefix to a text, like SentencePiece."""
    text = tokenizer.normalizer.normalize_str("a") if tokenizer.normalizer else "a"
    parts = tokenizer.pre_tokenizer.pre_tokenize_str(text) if tokenizer.pre_tokenizer else [(text, None)]
    return "".join(piece for piece, _ in parts) != "a"


def _places(
    conversation: Rendered, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[int, list[tuple[int, int, int]]]:
    """The number of tokens of the system text, and the positions of the turns. A token at a border belongs to the
    answer."""
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
                yield Line(which, number, *conversation(_record(content)), len(content))
            except UserError as error:
                faults.add(which, number, error.faults[0])


def _record(content: str) -> Mapping[str, Any]:
    """The object that a line holds. Raises UserError."""
    record = parse_json(decoded(content, None), "one JSON object a line")
    if not isinstance(record, dict):
        raise UserError(f"is no JSON object; give {EXAMPLES}")
    return record


@dataclass(frozen=True)
class PairEncoder(Encoder):
    """A line becomes two samples: the chosen and the rejected answer. Both are in one row, each after its own copy of
    the prompt, so that positions and attention are those of a single conversation. `src_length`: most tokens of the
    prompt if a pair exceeds `length`."""

    together: ClassVar = 2
    parsed: ClassVar = staticmethod(pair_of)

    def _conversations(self, line: Line) -> list[list[LineMessage]]:
        *prompt, chosen, rejected = line.contents
        return [[*prompt, chosen], [*prompt, rejected]]

    def _rendered(self, line: Line) -> list[Rendered]:
        both = super()._rendered(line)
        prompts = [
            conversation.text[: conversation.turns[-2].stop if len(conversation.turns) > 1 else conversation.system]
            for conversation in both
        ]
        if prompts[0] != prompts[1]:
            raise UserError("the chat template renders earlier turns differently for each answer; name another one")
        return both

    def _samples(self, line: Line, texts: list[Rendered], tokenised: list[Tokenised]) -> list[Sample]:
        """Earlier answers are not learnt, under any template."""
        first, *_ = tokenised
        lasts = [item.turns[-1] for item in tokenised]
        answers = [item.tokens[answer:stop] for item, (_, answer, stop) in zip(tokenised, lasts, strict=True)]
        asked = [item.unlearnt[begin:answer] for item, (begin, answer, _) in zip(tokenised, lasts, strict=True)]
        system = np.concatenate([self._in_front, first.unlearnt[: first.system]])
        left = self._room - 2 * len(system) - sum(map(len, (*asked, *answers)))
        last, dropped = lasts[0][0], len(first.turns) - 1
        while dropped and 2 * (last - first.turns[dropped - 1][0]) <= left:  # whole turns, while both prompts fit
            dropped -= 1
        prompts = [np.concatenate([system, first.unlearnt[first.turns[dropped][0] : last], item]) for item in asked]
        losses = [Losses(unopened=text.losses["unopened"], dropped=dropped) for text in texts]
        if left < 0:
            most = max(min(self.src_length, self.length // PROMPT_SHARE), 1)
            lost = [self._lost(item, len(prompt) - most, most) for item, prompt in zip(tokenised, prompts, strict=True)]
            prompts = [np.delete(prompt, gone - last + len(system)) for prompt, gone in zip(prompts, lost, strict=True)]
            fitted = self._fitted(answers, self._room - sum(map(len, prompts)))
            losses = [
                each._replace(shortened=len(gone), unended=len(answer) - len(kept))
                for each, gone, answer, kept in zip(losses, lost, answers, fitted, strict=True)
            ]
            answers = fitted
        samples = zip(prompts, answers, losses, strict=True)
        return [Sample(line, np.concatenate([prompt, answer]), each) for prompt, answer, each in samples]

    def _fitted(self, answers: list[Tokens], room: int) -> list[Tokens]:
        """Answers truncated in proportion to their lengths, as in PaddleNLP."""
        sizes = [len(answer) for answer in answers]
        if sum(sizes) <= room:
            return answers
        first = max(min(max(sizes[0] * room // sum(sizes), 1), room - 1), 0)
        return [answers[0][:first], answers[1][: max(room - first, 0)]]

    @property
    def _room(self) -> int:
        """Row positions of both together: all their tokens but the last ones, which predict nothing."""
        return self.length + 2
