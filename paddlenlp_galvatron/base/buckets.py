"""Sequences cut into buckets of limited size."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_buckets(members: Iterable[T], sizes: Sequence[int], limit: int) -> list[list[T]]:
    """The members in order, in buckets whose total is at most `limit`; a larger member has a bucket to itself. A bucket
    is closed when the next member does not fit."""
    buckets: list[list[T]] = []
    filled = 0
    for member, size in zip(members, sizes, strict=True):
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(member)
        filled += size
    return buckets
