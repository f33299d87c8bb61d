"""Byte-level BPE tokenizers: trained on the user's own text, or read from a `tokenizer.json`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from ...base.errors import UserError
from ...base.process import limited
from ...base.reading import read_text
from .special_tokens import special_tokens

END_OF_TEXT = "<|endoftext|>"
BYTES = 256  # every byte is a token, so any text can be written
LARGEST_ID = 2**31 - 1  # largest id that a data set can hold

_has_threads = False  # whether the package has begun its threads in this process


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `vocab_size` tokens at most (`limits.Trained`), the end of text (0) among
    them.

    The same documents always give the same tokenizer. Raises UserError when the vocabulary cannot hold every byte.
    """
    if vocab_size <= BYTES:
        raise UserError(f"vocab_size: {vocab_size} tokens cannot hold the {BYTES} bytes and the end of text; give more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    global _has_threads
    _has_threads = True
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a `tokenizer.json`, or that of a folder, with the special tokens that the files next to it add.

    Raises UserError."""
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{file}: no such file; give a tokenizer.json or the folder of a model that has one")
    text, special_ones = read_text(file), special_tokens(file)

    def read() -> Tokenizer:
        tokenizer = Tokenizer.from_str(text)
        special_ones.add_to(tokenizer)
        return tokenizer

    def attempt() -> bytes:
        try:
            read()
        except BaseException as error:  # the package raises a bare Exception for any fault of the file, or panics
            raise UserError(f"{file}: not a tokenizer.json: {error}") from None
        return b""

    limited(attempt, f"{file}: reading it", len(text))
    tokenizer = read()
    tokenizer.no_truncation()  # many files have the limits of their last use: the rest of a document would be lost,
    tokenizer.no_padding()  # or documents filled up with tokens that nobody wrote
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, without any that the tokenizer adds around them. Raises UserError."""
    return [encoding.ids for encoding in encodings(tokenizer, texts)]


def encodings(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    """Encode texts, with the characters that each token stands for. Raises UserError."""
    global _has_threads
    _has_threads = True
    around = tokenizer.post_processor
    try:
        tokenizer.post_processor = None  # some take the blanks out of a token's characters
        batch: list[Encoding] = tokenizer.encode_batch(texts, add_special_tokens=False)
        return batch
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the package is no Exception
        raise UserError(f"tokenizer: cannot turn the text into tokens: {error}; is tokenizer.json whole?") from None
    finally:
        tokenizer.post_processor = around


def encode_limited(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Runs `encode` under limits: the output of a tokenizer that others made may grow without bound, or never end."""

    def work() -> bytes:
        lists = encode(tokenizer, texts)
        return np.array([len(lists), *map(len, lists), *chain.from_iterable(lists)], np.int64).tobytes()

    size_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    what = f"tokenizer: turning {size_bytes:,} bytes of text into tokens"
    numbers = np.frombuffer(tokenising(work, what, size_bytes), np.int64)
    ids, ends = numbers[1 + numbers[0] :], np.cumsum(numbers[1 : 1 + numbers[0]])
    return [part.tolist() for part in np.split(ids, ends[:-1])] if len(texts) else []


def tokenising(work: Callable[[], bytes], name: str, size_bytes: int) -> bytes:
    """`limited`, for work that turns texts into tokens."""

    def alone() -> bytes:
        if threads:  # which a forked process lacks: it would wait for them for ever
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return work()

    threads = _has_threads
    return limited(alone, name, size_bytes)


def largest_id(tokenizer: Tokenizer) -> int:
    """The largest id of a vocabulary, which may have gaps. Raises UserError."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest > LARGEST_ID:
        raise UserError(
            f"tokenizer: has a token of id {largest}, beyond {LARGEST_ID:,}, the last that a data set can hold"
        )
    return largest
