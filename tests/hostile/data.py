"""Data sets: possible contents of others' files, by chance or by intent."""

from __future__ import annotations

import json
import struct
from random import Random

import numpy as np

from .case import Case

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
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


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
