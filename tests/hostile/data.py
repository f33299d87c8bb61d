"""Data sets and JSON lines: possible contents of others' files, by chance or by intent."""

from __future__ import annotations

import json
import struct
from functools import cache
from random import Random

import numpy as np

from .case import Case
from .grammar import json_file

HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2", 9: "<u4", 10: "<u8"}
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 8,
    "tie_word_embeddings": False,
}
PLAN = {
    "pp_deg": 1,
    "tp_sizes_enc": "1",
    "tp_consecutive_flags": "1",
    "dp_types_enc": "0",
    "use_sp": "0",
    "checkpoint": "0",
    "global_bsz": 1,
    "chunks": 1,
    "pp_division": "1",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "ddp",
    "vtp": 1,
    "vsp": 0,
    "embed_sdp": 0,
    "world_size": 1,
}
SPECIAL = {"bos_token": None, "eos_token": {"content": "<|endoftext|>", "lstrip": False}, "extra_special_tokens": ["a"]}
ENDS = {"eos_token_id": [0, 1]}
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def text(random: Random) -> Case:
    words = ("data", "prepare", "text.jsonl", "--tokenizer", "tokenizer.json", "--output", "out/x")
    files = {"text.jsonl": json_lines(random), "tokenizer.json": tokenizer(), "tokenizer_config.json": _json(SPECIAL)}
    return Case(words, files, writes=("out/x.bin", "out/x.idx"))


def other_tokenizer(random: Random) -> Case:
    words = ("data", "prepare", "text.txt", "--tokenizer", "tokenizer.json", "--output", "out/x")
    files = {"text.txt": b"a cat sat on a mat", "tokenizer.json": tokenizer(), "tokenizer_config.json": _json(SPECIAL)}
    beside = {"special_tokens_map.json": SPECIAL, "added_tokens.json": {"<|more|>": 300}, "config.json": ENDS}
    name, value = random.choice([("tokenizer.json", json.loads(tokenizer())), *beside.items()])
    files[name] = json_file(value, random)
    return Case(words, files, writes=("out/x.bin", "out/x.idx"))


def dataset(random: Random) -> Case:
    """A training run that would read it."""
    tokens, index = dataset_files(random)
    words = ("train", "plan.json", "--model", "model.json", "--data", "x", "--seq_length", "4", "--split", "1,1,0")
    files = {"x.bin": tokens, "x.idx": index, "model.json": _json(MODEL), "plan.json": _json(PLAN)}
    return Case((*words, "--max_steps", "1", "--dry_run"), files, writes=(".galvatron-index/", "output/"))


def dataset_files(random: Random) -> tuple[bytes, bytes]:
    """A `.bin` and an `.idx` of a few documents, with 0 to 3 faults: lies in the header and the lists, parts cut off,
    put in or flipped."""
    code = random.choice([*TYPES, 8, 8, 4])
    sizes = [random.randint(0, 12) for _ in range(random.randint(0, 8))]
    places = [sum(sizes[:n]) * np.dtype(TYPES[code]).itemsize for n in range(len(sizes))]
    entries = list(range(len(sizes) + 1))
    tokens = np.array([random.randint(0, 120) for _ in range(sum(sizes))], TYPES[code]).tobytes()
    header = [b"MMIDIDX\x00\x00", 1, code, len(sizes), len(entries)]
    for _ in range(random.randint(0, 3)):
        values = random.choice([sizes, places, entries, header])
        if values:
            at = random.randrange(1 if values is header else 0, len(values))
            values[at] = (
                random.choice(EXTREMES) if random.random() < 0.5 else values[at] + random.choice([-8, -1, 1, 8])
            )
    index = HEADER.pack(header[0], header[1] % 2**64, header[2] % 256, header[3] % 2**64, header[4] % 2**64)
    index += b"".join(struct.pack("<I", size % 2**32) for size in sizes)
    index += b"".join(struct.pack("<Q", value % 2**64) for value in (*places, *entries))
    if random.random() < 0.2:
        index = damaged(random, index)
    if random.random() < 0.2:
        tokens = damaged(random, tokens)
    return tokens, index


@cache
def tokenizer() -> bytes:
    from paddlenlp_galvatron.training.data.tokenizer import train_tokenizer

    return train_tokenizer(["a cat sat on a mat"], 300).to_str().encode()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def damaged(random: Random, content: bytes) -> bytes:
    """Cut off, longer, another, or with other bytes or NULs in it, as a disk, a copy or a loss of power leaves it."""
    at = random.randint(0, len(content))
    noise = random.randbytes(random.choice([1, 2, 8, 64]))
    kind = random.randrange(6)
    return (
        content[:at],
        content + noise,
        content[:at] + noise + content[at + len(noise) :],
        content[:at] + bytes(len(content) - at),
        content[:at] + content[at + len(noise) :],
        noise,
    )[kind]


def json_lines(random: Random) -> bytes:
    """Lines that hold a text under "text", and now and then one that is no JSON, or JSON that nobody can use."""
    lines = [_line(random) for _ in range(random.randint(0, 6))]
    content = random.choice([b"\n", b"\n", b"\r\n", b"\n\n"]).join(lines)
    if random.random() < 0.1:
        content = b"\xef\xbb\xbf" + content
    return damaged(random, content) if random.random() < 0.2 else content


def _line(random: Random) -> bytes:
    if random.random() < 0.8:
        text = random.choice(["a cat", "où l'été dure", "\x1b[31mred", "\0", "  ", "", "🐈", "a\tb\nc"])
        return json.dumps({"text": text, "more": _value(random, 3)}, ensure_ascii=random.random() < 0.5).encode()
    depth = random.choice([10, 63, 64, 65, 1000, 100_000])
    open_, close = random.choice([("[", "]"), ('{"a":', "}")])
    key = random.choice(['"text"', '"\\u0074ext"', '"te\x1b[2Jxt"', '"\\udfff"', "text", "null"])
    return random.choice(
        [
            b'{"text": "half \\ud800"}',
            b'{"text": "\\udc00\\ud800"}',
            b'{"text": "\xed\xa0\x80"}',
            b'{"text": "\xff\xfe"}',
            b'{"text": 1e999}',
            b'{"text": "a", "n": ' + b"9" * random.choice([39, 5000]) + b"}",
            b'{"text": "a", "n": ' + random.choice([b"NaN", b"-Infinity", b"-0", b"1e-999", b"0x1", b"01"]) + b"}",
            b'{"text": "a", "text": "b"}',
            b'{"text": "a"} {"text": "b"}',
            f'{{{key}: "a"}}'.encode(),
            b'{"text": ' + open_.encode() * depth + b"1" + close.encode() * depth + b"}",
            open_.encode() * depth,
            f'{{"text": {json.dumps(_value(random, 2))}}}'.encode(),
            json.dumps(_value(random, 2)).encode(),
            b'{"text": "' + b"a" * random.choice([1, 100_000]),
            '{"text": "wide"}'.encode("utf-16"),
            random.randbytes(20),
            b"\0" * 20,
        ]
    )


def _value(random: Random, depth: int) -> object:
    kind = random.randrange(8 if depth else 6)
    if kind == 6:
        return [_value(random, depth - 1) for _ in range(random.randint(0, 3))]
    if kind == 7:
        return {random.choice("abc"): _value(random, depth - 1) for _ in range(random.randint(0, 3))}
    return (None, True, random.choice(EXTREMES), random.random(), "", "text")[kind]
