"""Pairs of answers: lines of PaddleNLP's DPO data as two conversations that differ in their last answer.

    {"src": ["u1", "u2"], "tgt": ["b1"], "response": ["good", "bad"], "sort": [1, 0]}

The answer with the larger number in `sort` is the chosen one. Both stand in one row, each behind a prompt of its own,
so that positions and attention are those of a conversation alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base.errors import UserError
from .conversations import Encoder, Line, Sample, context_of, of_turns, texts_of
from .templates import ANSWERS, Message

PROMPT_SHARE = 4  # a pair that is too long keeps at most this part of a row of its prompt, twice, and its answers


@dataclass(frozen=True)
class PairEncoder(Encoder):
    """A line becomes two samples: the chosen answer's and the rejected one's. `src_length`: most tokens of a prompt,
    where a pair is longer than `length`."""

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
