"""One rank of a launch that computes on the fake device. Arguments: the change, the worker's module, and the
worker's own arguments.

Allocations, frees and waits of the passes of each step are written next to the mailboxes, or of each update with
optimizer states in the host's memory: "offloaded".
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before Paddle is imported. Views would need kernels that the device has not.
os.environ |= {"PADDLE_DISTRI_BACKEND": "xccl", "FLAGS_selected_fakes": "0", "FLAGS_use_stride_kernel": "0"}

from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.gradients import HostStates
from paddlenlp_galvatron.runtime.groups import run_as_rank, start_world
from paddlenlp_galvatron.runtime.pipeline import Headroom, Pipeline


def nothing() -> None:
    pass


def around(
    method: Callable[..., Any], before: Callable[[], Any] = nothing, after: Callable[[], Any] = nothing
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        before()
        out = method(*arguments, **named)
        after()
        return out

    return call


def main() -> None:
    from fake_device import FOLDER, FakeDevice

    changed, module, *arguments = sys.argv[1:]
    fake, counted, begun = FakeDevice(), [], []
    start_world()
    fake.install()

    def begin() -> None:
        begun[:] = [fake.counts()]

    def end() -> None:
        counted.append(fake.counts().since(*begun))

    def cold() -> None:
        """An engine begins with nothing that another one has left."""
        gc.collect()
        device.release()

    Engine.__init__ = around(Engine.__init__, before=cold)  # type: ignore[method-assign]
    Headroom.reserve = around(Headroom.reserve, after=begin)  # type: ignore[method-assign]
    if changed == "offloaded":
        HostStates.update = around(HostStates.update, begin, end)  # type: ignore[method-assign]
    else:
        Pipeline._run = around(Pipeline._run, begin, end)  # type: ignore[method-assign]
    worker = importlib.import_module(module)
    sys.argv[1:] = arguments
    worker.main()
    (Path(os.environ[FOLDER]) / f"counts.{os.environ['PADDLE_TRAINER_ID']}.json").write_text(json.dumps(counted))


if __name__ == "__main__":
    run_as_rank(main)
