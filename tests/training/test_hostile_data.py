"""For any folder of data: one line a fault and nothing left behind, or the data as they stand there."""

import struct
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.training.data.source import TrainingData

SEQ = 4
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


@given(random=st.randoms(use_true_random=False))
def test_a_data_set_is_read_as_it_stands_or_refused(tmp_path_factory, random):
    folder = tmp_path_factory.mktemp("hostile")
    tokens, index = dataset_files(random)
    (folder / "x.bin").write_bytes(tokens)
    (folder / "x.idx").write_bytes(index)
    try:
        read = TrainingData(folder / "x", SEQ, 1, seed=3, shares="1,0,0")
        batches = [read.batch(step) for step in range(read.samples + 1)]
    except UserError as error:
        assert len(error.faults) == 1
        return
    kind = np.dtype(TYPES[HEADER.unpack(index[: HEADER.size])[2]])
    stored = np.frombuffer(tokens, kind).astype(np.int64).tolist()
    assert all(batch.shape == (1, SEQ + 1) and set(batch[0]) <= set(stored) for batch in batches)
