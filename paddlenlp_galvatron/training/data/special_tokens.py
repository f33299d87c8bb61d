"""The special tokens of a tokenizer, as transformers 5 finds them in the files next to tokenizer.json.

tokenizer_config.json names them. Without `added_tokens_decoder` in it, special_tokens_map.json wins over it, and
added_tokens.json adds tokens. `add_bos_token` and `add_eos_token` have no effect with a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from ...base import UserError, shortened
from ...base.reading import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MODEL_FILES = ("generation_config.json", "config.json")  # the first that has an eos_token_id counts
EOS, EOS_ID = "eos_token", "eos_token_id"
NAMES = ("bos_token", EOS, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DECODER = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"  # without names; the latter is the older field
# How well-known tokenizers call the token that ends a document; for a tokenizer.json of which no file says it.
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
LONGEST_LIST = 120  # characters
MOST_DIGITS = 10  # of a token's id
REMEDY = f'name it: "{EOS}" in {TOKENIZER_CONFIG} next to tokenizer.json, or galvatron data prepare --end_token'


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that the files next to a tokenizer.json name or add."""

    texts: Mapping[str, str | None] = field(default_factory=dict)  # by name, as templates read them; None: none
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
    note: str | None = None  # for the user, where the files leave it open or contradict one another


def end_of_text(tokenizer: Tokenizer, path: Path | None = None, text: str | None = None) -> End:
    """The token of that text, which the user names; else the `eos_token` of the tokenizer at `path`; else the model's
    `eos_token_id` there. Raises UserError: it has none, or several."""
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
    for usual_end in KNOWN_ENDS:
        if usual_end in special:
            return End(
                _id(tokenizer, usual_end), usual_end, f"the tokenizer's files name no {EOS}; {usual_end} is taken"
            )
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
    """The part of a special_tokens_map.json that counts: for names beyond NAMES a text in tokenizer_config.json wins,
    and so does its list of tokens without names."""
    extra_names = {name for name, value in config.items() if name not in NAMES and isinstance(value, str)}
    if isinstance(config.get(EXTRA, config.get(ADDITIONAL)), list):
        extra_names.add(ADDITIONAL)
    return {name: value for name, value in defined.items() if name not in extra_names}


def _named(defined: Mapping[str, Any], file: Path) -> dict[str, AddedToken | None]:
    """Tokens by name; None: there is none of that name. Raises UserError."""
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
    """The object in a file; none: an empty one. Raises UserError."""
    content = read_json(file) if file.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds no JSON object; is it the right file?")
    return content


def _folder(tokenizer: Path) -> Path:
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def _shown(texts: Sequence[str]) -> str:
    return shortened(", ".join(texts), LONGEST_LIST) or "none"
