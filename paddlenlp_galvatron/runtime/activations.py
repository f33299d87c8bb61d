"""Keeps activations of layers in host memory between a layer's forward and its backward.

Paddle passes each tensor that backward will read. A layer's tensors are copied to host memory during the next offloaded
layer's forward and return during the following layer's backward. So the device has those of three layers at once: the
running layer, one with outgoing copies, and one with incoming copies. Weights, masks and tables stay on the device.
Page-locked memory is reused.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import paddle
from paddle.autograd import saved_tensors_hooks

from ..base.units import MIB
from . import device
from .paddle_private import fills_memory, host_tensor, part_of, sharing

_keeping: _Record | None = None  # record of the layer whose forward runs


def keep(*tensors: Any) -> Callable[[], tuple[Any, ...]]:
    """Returns a call that gives the tensors back in backward, once: for PyLayers, whose tensors Paddle does not
    track."""
    if _keeping is None:
        return lambda: tensors
    uses = [_keeping.keep(tensor) for tensor in tensors]
    return lambda: tuple(use.take() for use in uses)


class _Kept:
    """A tensor that backward reads, or several on the same memory."""

    def __init__(self, tensor: Any, away: int):
        self.size, self.away = int(tensor.size), away  # elements; number of the last ones that are offloaded
        with paddle.no_grad():
            flat = tensor if tensor.is_contiguous() else tensor.as_strided([self.size], [1])
        self.whole: Any = sharing(flat, [self.size])  # None: not on the device
        self.stays: Any = None  # the other elements, while the last ones are offloaded
        self.host: Any = None
        self.uses = 0


class _Use:
    """A tensor for one reader in backward."""

    def __init__(self, record: _Record, kept: _Kept, tensor: Any):
        self._record, self._kept = record, kept
        self._shape, self._learns = tensor.shape, not tensor.stop_gradient
        self._strides = None if tensor.is_contiguous() else tensor.strides
        kept.uses += 1

    def take(self) -> Any:
        self._record.be_present()
        kept = self._kept
        tensor = sharing(kept.whole, self._shape)
        if self._strides:
            tensor = tensor.as_strided(self._shape, self._strides)
        tensor.stop_gradient = not self._learns
        kept.uses -= 1
        if not kept.uses:  # autograd's graph holds this until all of backward ends
            kept.whole = None
        return tensor


class _Record:
    """Tensors that a layer keeps of one micro-batch."""

    def __init__(self, window: Window, chunk: int, most_bytes: int | None, fixed: set[int]):
        self._window, self.chunk, self._fixed = window, chunk, fixed
        self._left = most_bytes  # bytes still to offload; None: all
        self.before = window.latest  # the previous offloaded layer
        self.tensors: dict[tuple[int, int, Any], _Kept] = {}
        self.bytes = 0
        self.event: Any = None  # recorded after the copies in flight
        self.began = False  # whether its backward has begun

    def pack(self, tensor: Any) -> Any:
        """A tensor that Paddle saves for backward."""
        is_activation = not tensor.stop_gradient and not tensor.is_leaf and tensor.data_ptr() not in self._fixed
        if is_activation and fills_memory(tensor):
            return self.keep(tensor)
        stays = tensor.detach()  # detached from its graph
        stays.stop_gradient = tensor.stop_gradient
        return stays

    @staticmethod
    def unpack(packed: Any) -> Any:
        """The tensor again in backward. Paddle frees the memory of the tensor that this returns."""
        return packed.take() if isinstance(packed, _Use) else sharing(packed)

    def keep(self, tensor: Any) -> _Use:
        key = tensor.data_ptr(), int(tensor.size), tensor.dtype
        if key not in self.tensors:
            size, each = int(tensor.size), tensor.element_size()
            away = size if self._left is None else min(size, self._left // each)
            if self._left is not None:
                self._left -= away * each
            self.bytes += size * each
            self.tensors[key] = _Kept(tensor, away)
        return _Use(self, self.tensors[key], tensor)

    def be_present(self) -> None:
        """Called when backward reads a tensor: the first begins the layer's backward."""
        if not self.began:
            self.began = True
            self._window.begin_backward(self)


class Window:
    """Copies of a stage's layers in flight, and its page-locked memory."""

    def __init__(self, chunks: int) -> None:
        self.latest: _Record | None = None  # record of the running pass
        self._in_flight: list[deque[_Record | None]] = [deque() for _ in range(chunks)]  # the last of each micro-batch
        self._waiting: _Record | None = None  # stays on the device until another layer begins
        self._leaving: _Record | None = None
        self._fetched: Any = None  # event after the latest copies to the device
        self._free: dict[tuple[int, Any, int], list[Any]] = defaultdict(list)  # keyed by chunk, type and size
        self._made: dict[tuple[int, Any, int], int] = defaultdict(int)
        self.host_mib = 0.0  # size of page-locked memory
        self._bytes: dict[Hashable, int] = {}  # kept by the last layer of each kind that ran

    @cached_property
    def _to_device(self) -> device.CopyStream:
        return device.CopyStream()

    @cached_property
    def _to_host(self) -> device.CopyStream:
        return device.CopyStream()

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        """Around the forward pass of a chunk."""
        self.latest = None
        yield
        if paddle.is_grad_enabled():
            self._in_flight[chunk].append(self.latest)

    @contextmanager
    def recording(self, chunk: int, kind: Hashable, percent: int, fixed: set[int], by_paddle: bool) -> Iterator[None]:
        """Around the forward of a layer: `percent` of its kept bytes will be offloaded. `by_paddle`: only Paddle's
        calls keep tensors, as in a recomputed layer."""
        global _keeping
        most_bytes = None if percent == 100 else self._bytes.get(kind, 0) * percent // 100
        record = _Record(self, chunk, most_bytes, fixed)
        if self._waiting:
            self._leave()
        _keeping = None if by_paddle else record
        try:
            with saved_tensors_hooks(record.pack, record.unpack):
                yield
        finally:
            _keeping = None
        self._bytes[kind] = record.bytes
        self._end_leaving()
        self._waiting = self.latest = record

    def fetch_ahead(self, chunk: int) -> None:
        """Start fetching for the backward pass that comes next."""
        if self._in_flight[chunk] and (record := self._in_flight[chunk][0]):
            self._fetch(record)

    def next_backward(self, chunk: int) -> None:
        """The backward pass of a chunk begins."""
        self._in_flight[chunk].popleft()

    def begin_backward(self, record: _Record) -> None:
        """Make a layer's tensors present on the device, and fetch those of the previous layer."""
        self._end_leaving()
        if record is self._waiting:
            self._waiting = None
        elif self._waiting:
            self._leave()
        self._fetch(record)
        device.wait_in_stream(record.event)
        if record.before:
            self._fetch(record.before)

    def reserve(self, in_flight: list[int]) -> None:
        """Allocate page-locked memory for these numbers of micro-batches in flight of each chunk; it exists for one."""
        for key, number in list(self._made.items()):
            self._free[key] += [self._new(key) for _ in range(number * (in_flight[key[0]] - 1))]

    def _leave(self) -> None:
        """Queue the waiting layer's copies to the host."""
        record, self._waiting = self._waiting, None
        assert record
        self._leaving = record
        with paddle.no_grad():
            for kept in record.tensors.values():
                if 0 < kept.away < kept.size:
                    kept.stays = part_of(kept.whole, 0, kept.size - kept.away).clone()
                if kept.away:
                    kept.host = self._place(record.chunk, kept)
            with self._to_host.after(device.event_here()):
                device.wait_in_stream(self._fetched)  # kernels in flight may still read this memory
                for kept in record.tensors.values():
                    if kept.away:
                        source = part_of(kept.whole, kept.size - kept.away, kept.size)
                        part_of(kept.host, 0, kept.away).copy_(source, False)
                record.event = device.event_here()

    def _end_leaving(self) -> None:
        """Release the device memory of an offloaded layer: later kernels wait for its copies to the host."""
        if record := self._leaving:
            device.wait_in_stream(record.event)
            record.event, self._leaving = None, None
            for kept in record.tensors.values():
                if kept.away:
                    kept.whole = None

    def _fetch(self, record: _Record) -> None:
        """Queue the copies from the host, unless in flight."""
        if record is self._leaving:
            self._end_leaving()
        missing = [kept for kept in record.tensors.values() if kept.host is not None]
        if not missing or record is self._waiting:
            return
        with paddle.no_grad():
            for kept in missing:
                kept.whole = paddle.empty([kept.size], kept.host.dtype)
                if kept.stays is not None:
                    part_of(kept.whole, 0, kept.size - kept.away).copy_(kept.stays, False)
            with self._to_device.after(device.event_here()):
                for kept in missing:
                    target = part_of(kept.whole, kept.size - kept.away, kept.size)
                    target.copy_(part_of(kept.host, 0, kept.away), False)
                record.event = self._fetched = device.event_here()
        for kept in missing:  # a later copy to this memory waits for these copies
            self._free[record.chunk, kept.host.dtype, int(kept.host.size)].append(kept.host)
            kept.host = kept.stays = None

    def _place(self, chunk: int, kept: _Kept) -> Any:
        """Page-locked memory for the offloaded elements, with a margin, as experts' rows vary."""
        unit = 1 << max(kept.away.bit_length() - 4, 0)
        key = chunk, kept.whole.dtype, -(-kept.away // unit) * unit
        return self._free[key].pop() if self._free[key] else self._new(key)

    def _new(self, key: tuple[int, Any, int]) -> Any:
        self._made[key] += 1
        _, dtype, size = key
        made = host_tensor(size, dtype)
        self.host_mib += size * made.element_size() / MIB
        return made
