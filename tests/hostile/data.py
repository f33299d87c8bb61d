"""Data sets: possible contents of others' files, by chance or by intent."""

import struct
from random import Random

import numpy as np

HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2", 9: "<u4", 10: "<u8"}
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


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
