"""Hostfiles."""

from __future__ import annotations

from random import Random

from .case import Case
from .grammar import ESCAPES, damaged

LINES = [
    *("127.0.0.1", "127.0.0.1 slots=8", "10.0.0.1", "localhost", "node-0.example", "# comment", "", " ", "::1", "%"),
    *(
        ESCAPES,
        "256.256.256.256",
        "a" * 300,
        "é",
        "-1",
        "0",
        "\u202e1.0.0.721",
        "xn--",
        ".",
        "a..b",
        "1 2 3",
        "\t127.0.0.1",
    ),
]


def hostfile(random: Random) -> Case:
    count = random.choice((0, 1, 1, 2, 3, 50_000 if random.random() < 0.05 else 4))
    text = "\n".join(random.choice(LINES) for _ in range(count)).encode()
    flags = [f"--{name}={random.choice(values)}" for name, values in FLAGS.items() if random.random() < 0.3]
    words = ("profile", "hardware", "--hostfile", "hosts", "--analytic", "h100", "--output", "out", *flags)
    return Case(words, {"hosts": damaged(text, random)}, writes=("out/",))


FLAGS = {
    "num_nodes": ("1", "2", "x", "-1", "1e9", "9" * 5000, "nan"),
    "node_rank": ("0", "1", "x", "-1"),
    "num_gpus_per_node": ("8", "0", "65537", "x"),
    "master_port": ("1", "0", "65536", "x"),
}
