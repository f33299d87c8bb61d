"""Between the first message of a step and the last, nothing may pass between host and device: such traffic raises.

On a GPU a copy, or the reading of a value, waits for all work of the device: for receives that were posted
ahead, too, which may wait for a message that this rank has yet to send.
"""

from collections.abc import Callable
from typing import Any

import paddle

from paddlenlp_galvatron.runtime import collectives
from paddlenlp_galvatron.runtime.experts import Routing
from paddlenlp_galvatron.runtime.pipeline import Pipeline
from paddlenlp_galvatron.runtime.stage import Stage

READS = ("numpy", "item", "tolist", "cpu", "cuda", "__float__", "__int__", "__bool__", "__index__", "__array__")

# Operators that copy between host and device, or whose size the host must know, or that sort: of one axis, Paddle's
# GPU kernel allocates from the device and frees to it at every call, which waits for posted receives.
WAITING = ("nonzero", "masked_select", "unique", "argsort", "sort")
WRITES = ("set_value", "copy_", "pin_memory", "_copy_to", *WAITING)
MAKERS = ("to_tensor", "repeat_interleave", *WAITING)


class HostTraffic(AssertionError):
    """Something was copied or read while messages were under way."""


def count_reads() -> list[str]:
    """Gets a name each time that the host reads a value of a device, from now on, in this process."""
    reads: list[str] = []
    within: list[str] = []

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not within:
                reads.append(name)
            within.append(name)  # one way of reading takes another
            try:
                return method(*arguments, **named)
            finally:
                within.pop()

        return call

    for name in READS:
        if hasattr(paddle.Tensor, name):
            setattr(paddle.Tensor, name, counted(name, getattr(paddle.Tensor, name)))
    return reads


def forbid_host_traffic() -> None:
    """From now on, in this process, from the first message or pass of every `Pipeline.run` and `Pipeline.evaluate`."""
    within: list[str] = []  # runs that have not ended
    begun: list[str] = []  # their names
    # For each layer of experts and micro-batch a read, of how many rows each gets, and their places, which go to the
    # device through page-locked memory on the compute stream (`device.to_device`).
    allowed: list[str] = []

    def guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if begun and name in allowed:
                allowed.remove(name)
            elif begun:
                raise HostTraffic(f"{name} while messages are under way, since {begun[0]}")
            return method(*arguments, **named)

        return call

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            within.append("a step")
            try:
                return run(*arguments, **named)
            finally:
                within.pop()
                begun.clear()

        return call

    def beginning(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if within:
                begun.append(what)
            return method(*arguments, **named)

        return call

    for name in (*READS, *WRITES):
        if hasattr(paddle.Tensor, name):
            setattr(paddle.Tensor, name, guarded(name, getattr(paddle.Tensor, name)))
    for name in MAKERS:
        setattr(paddle, name, guarded(name, getattr(paddle, name)))

    def routed(route: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            allowed.extend(("numpy", "to_tensor", "to_tensor"))
            route(*arguments, **named)
            assert not allowed, f"not called for the rows of experts: {allowed}"

        return call

    Routing.__init__ = routed(Routing.__init__)  # type: ignore[method-assign]
    collectives._start = beginning("a message", collectives._start)
    Stage.forward = beginning("a pass", Stage.forward)  # type: ignore[method-assign]
    Pipeline.run, Pipeline.evaluate = watched(Pipeline.run), watched(Pipeline.evaluate)  # type: ignore[method-assign]
