"""Byte-level BPE tokenizers: trained on the user's text, or read from a `tokenizer.json`; and their special tokens,
found like in transformers 5 in the files next to it.

tokenizer_config.json names them. Without `added_tokens_decoder` in it, special_tokens_map.json wins over it, and
added_tokens.json adds tokens. `add_bos_token` and `add_eos_token` have no effect with a tokenizer.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from ...base import UserError, shortened
from ...base.process import limited
from ...base.reading import read_json, read_text

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MODEL_FILES = ("generation_config.json", "config.json")  # the first with an eos_token_id is used
EOS, EOS_ID = "eos_token", "eos_token_id"
NAMES = ("bos_token", EOS, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DECODER = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"  # fields of unnamed tokens; the second is older
# End-of-document tokens of well-known tokenizers, for a tokenizer.json without such information.
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
LONGEST_LIST = 120  # characters
MOST_DIGITS = 10  # digits of a token's id
REMEDY = f'name it: "{EOS}" in {TOKENIZER_CONFIG} next to tokenizer.json, or galvatron data prepare --end_token'


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that the files next to a tokenizer.json name or add."""

    texts: Mapping[str, str | None] = field(default_factory=dict)  # keyed by name for templates; None: none
    tokens: Sequence[AddedToken] = ()  # the named ones, then those without a name
    listed: Mapping[int, AddedToken] = field(default_factory=dict)  # added tokens by id
    replaces: bool = False  # whether `listed` wins over the added tokens of tokenizer.json
    split: bool = False  # whether special tokens within a text are split like other text

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Add the tokens to a tokenizer. New ones get their ids in the order of transformers."""
        present = tokenizer.get_added_tokens_decoder()
        listed = self.listed if self.replaces else {**self.listed, **present}
        described = {token.content: token for token in listed.values()}
        contents = {token.content for token in (*present.values(), *listed.values())}
        added = [token for _, token in sorted(listed.items())]
        added += [described.get(token.content, token) for token in self.tokens if token.content not in contents]
        for token in added:
            token.special = token.special or token.content in self.texts.values()
        tokenizer.add_tokens(added)
        tokenizer.encode_special_tokens = self.split


def special_tokens(tokenizer: Path) -> SpecialTokens:
    """Read the files next to a tokenizer.json, or in its folder. Raises UserError."""
    folder = _folder(tokenizer)
    config = _object(folder / TOKENIZER_CONFIG)
    replaces = config.get(DECODER) is not None
    later = {} if replaces else _later(config, _object(folder / TOKENS_MAP))
    named = _named(config, folder / TOKENIZER_CONFIG) | _named(later, folder / TOKENS_MAP)
    named = {name: named[name] for name in (*NAMES, *named) if name in named}
    unnamed = _unnamed(config, folder / TOKENIZER_CONFIG) + _unnamed(later, folder / TOKENS_MAP)
    tokens = [token for token in (*named.values(), *unnamed) if token]
    if replaces:
        file, decoder = folder / TOKENIZER_CONFIG, config[DECODER]
        if not isinstance(decoder, dict):
            raise UserError(f"{file}: {DECODER}: is no object; give each token by its number")
        listed = {_number(number, file): _token(token, file, DECODER) for number, token in decoder.items()}
    else:
        file, special = folder / ADDED_TOKENS, {token.content for token in tokens}
        listed = {
            _number(number, file): AddedToken(text, normalized=text not in special, special=text in special)
            for text, number in _object(file).items()
        }
    texts = {name: token.content if token else None for name, token in named.items()}
    return SpecialTokens(texts, tokens, listed, replaces, config.get("split_special_tokens") is True)


class End(NamedTuple):
    """The token that ends a document, or an answer where there is no template."""

    token: int
    text: str
    note: str | None = None  # for the user, if the files have none or contradict each other


def end_of_text(tokenizer: Tokenizer, path: Path | None = None, text: str | None = None) -> End:
    """The token that the user names; else the `eos_token` of the tokenizer at `path`; else the model's `eos_token_id`
    there. Raises UserError if there is none or several."""
    if text is not None:
        return End(_id(tokenizer, text), text)
    named = special_tokens(path).texts.get(EOS) if path else None
    file, ids = _stops(path) if path else (None, [])
    stops = _shown([f"{number} ({tokenizer.id_to_token(number)})" for number in ids])
    if named is not None:
        end = End(_id(tokenizer, named, f"{EOS} of {path}"), named)
        unlike = f"{file}: {EOS_ID} is {stops}; the tokenizer's {EOS} is taken, {end.token} ({named})"
        return end._replace(note=unlike) if ids and end.token not in ids else end
    if len(ids) == 1 and (content := tokenizer.id_to_token(ids[0])) is not None:
        return End(ids[0], content, f"the tokenizer's files name no {EOS}; {EOS_ID} of {file} is taken, {stops}")
    if ids:
        raise UserError(f"{EOS}: the tokenizer's files name none, and {EOS_ID} of {file} is {stops}; {REMEDY}")
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    for usual in KNOWN_ENDS:
        if usual in special:
            return End(_id(tokenizer, usual), usual, f"the tokenizer's files name no {EOS}; {usual} is taken")
    raise UserError(f"{EOS}: the tokenizer's files name none; its special tokens: {_shown(special)}; {REMEDY}")


def _id(tokenizer: Tokenizer, text: str, source: str = "end_token") -> int:
    token: int | None = tokenizer.token_to_id(text)
    if token is None:
        raise UserError(f"{source}: the tokenizer has no token {text!r}; give one of its own")
    return token


def _stops(path: Path) -> tuple[Path | None, list[int]]:
    """The tokens at which the model ends a text, and the file that has them. Raises UserError."""
    for file in (_folder(path) / name for name in MODEL_FILES):
        value = _object(file).get(EOS_ID)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int for number in ids):
            raise UserError(f"{file}: {EOS_ID}: {shortened(str(value))} is no token; give its number or a list")
        if ids := [number for number in ids if 0 <= number < 2**32]:  # -1 is none
            return file, ids
    return None, []


def _later(config: Mapping[str, Any], defined: dict[str, Any]) -> dict[str, Any]:
    """Entries of a special_tokens_map.json that apply. tokenizer_config.json overrides strings of names beyond NAMES,
    and the list of unnamed tokens."""
    extra_names = {name for name, value in config.items() if name not in NAMES and isinstance(value, str)}
    if isinstance(config.get(EXTRA, config.get(ADDITIONAL)), list):
        extra_names.add(ADDITIONAL)
    return {name: value for name, value in defined.items() if name not in extra_names}


def _named(defined: Mapping[str, Any], file: Path) -> dict[str, AddedToken | None]:
    """Tokens by name; None: no token of that name. Raises UserError."""
    extra = defined[EXTRA] if isinstance(defined.get(EXTRA), dict) else {}
    return {
        name: None if name in NAMES and value in (None, "") else _token(value, file, name)
        for name, value in {**defined, **extra}.items()
        if name in NAMES or name in extra or (name.endswith("_token") and isinstance(value, str | dict))
    }


def _unnamed(defined: Mapping[str, Any], file: Path) -> list[AddedToken]:
    """Raises UserError."""
    name = EXTRA if defined.get(EXTRA) and not isinstance(defined[EXTRA], dict) else ADDITIONAL
    values = defined.get(name) or []
    if not isinstance(values, list):
        raise UserError(f"{file}: {name}: is no list; give a list of tokens")
    return [_token(value, file, name) for value in values]


def _token(value: object, file: Path, name: str) -> AddedToken:
    """A token that is written as its text, or as an object. Raises UserError."""
    if isinstance(value, str):
        return AddedToken(value, normalized=False, special=True)
    defined = value if isinstance(value, dict) else {}
    flags = {flag: defined[flag] for flag in FLAGS if flag in defined}
    if not isinstance(defined.get("content"), str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise UserError(f'{file}: {name}: {shortened(str(value))} is no token; give its text, or {{"content": …}}')
    if file.name == TOKENS_MAP:
        flags["special"] = True
    return AddedToken(defined["content"], **flags)


def _number(value: object, file: Path) -> int:
    """A token's id. Raises UserError."""
    text = str(value)
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise UserError(f"{file}: {shortened(text)} is no token's number; give a whole number")
    return int(text)


def _object(file: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file. Raises UserError."""
    content = read_json(file) if file.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds no JSON object; is it the right file?")
    return content


def _folder(tokenizer: Path) -> Path:
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def _shown(texts: Sequence[str]) -> str:
    return shortened(", ".join(texts), LONGEST_LIST) or "none"


END_OF_TEXT = "<|endoftext|>"
BYTES = 256  # every byte is a token, so any text can be written
LARGEST_ID = 2**31 - 1  # largest id that a data set can hold

_has_threads = False  # whether the package has started threads in this process


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
    tokenizer.no_truncation()  # many files keep the limits of their last use, which would cut documents
    tokenizer.no_padding()  # padding would add tokens to documents
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
        tokenizer.post_processor = None  # some exclude spaces from a token's characters
        batch: list[Encoding] = tokenizer.encode_batch(texts, add_special_tokens=False)
        return batch
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the package is no Exception
        raise UserError(f"tokenizer: cannot turn the text into tokens: {error}; is tokenizer.json whole?") from None
    finally:
        tokenizer.post_processor = around


def encode_limited(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Runs `encode` with limits: a foreign tokenizer may produce unbounded output or never end."""

    def work() -> bytes:
        lists = encode(tokenizer, texts)
        return np.array([len(lists), *map(len, lists), *chain.from_iterable(lists)], np.int64).tobytes()

    size_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    what = f"tokenizer: turning {size_bytes:,} bytes of text into tokens"
    numbers = np.frombuffer(tokenising(work, what, size_bytes), np.int64)
    ids, ends = numbers[1 + numbers[0] :], np.cumsum(numbers[1 : 1 + numbers[0]])
    return [row.tolist() for row in np.split(ids, ends[:-1])] if len(texts) else []


def tokenising(work: Callable[[], bytes], name: str, size_bytes: int) -> bytes:
    """`limited`, for work that turns texts into tokens."""

    def alone() -> bytes:
        if threads:  # a forked process lacks the threads and would wait for ever
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
