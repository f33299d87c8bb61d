"""Hugging Face directories: a sound one, one of whose files is not."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from random import Random

from .case import Case
from .grammar import damaged, dump, json_file, mutated

SOUND = Path(__file__).parents[1] / "fixtures" / "huggingface" / "llama"


@cache
def sound() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in SOUND.iterdir() if not path.name.startswith("oracle")}


def huggingface(random: Random) -> Case:
    files = dict(sound())
    name = random.choice(list(files))
    files[name] = _tensors(files[name], random) if name.endswith(".safetensors") else _json(files[name], random)
    return Case(
        ("convert", "h2g", "hf", "out"),
        {f"hf/{name}": content for name, content in files.items()},
        writes=("out/",),
    )


def _json(content: bytes, random: Random) -> bytes:
    return json_file(json.loads(content), random)


def _tensors(content: bytes, random: Random) -> bytes:
    """Another header, another length of it, or the bytes damaged."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    text = dump(mutated(header, random)).encode(errors="surrogatepass")
    reported = random.choice((len(text),) * 6 + (0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1))
    return damaged(struct.pack("<Q", reported) + text + data, random)
