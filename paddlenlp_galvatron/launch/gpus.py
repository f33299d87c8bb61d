"""The GPUs of this node, as Paddle sees them and as the system does, and what NCCL's defaults are changed to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

DEVICES = Path("/dev")
P2P_CHANNELS = "NCCL_MAX_P2P_NCHANNELS"
# A posted receive is a kernel that waits on the GPU, a block for each channel, from the call to the message: with the
# 16 to 32 that NCCL takes between GPUs of a node it holds up to a quarter of an H100's 132 multiprocessors. Between
# nodes it takes about 2. How much longer messages take with 4 is not known yet.
CHANNELS = "4"


def gpu_count() -> int:
    """GPUs of this node that Paddle can use."""
    import paddle

    return int(paddle.device.cuda.device_count()) if paddle.is_compiled_with_cuda() else 0


def unused_gpus() -> list[str]:
    """NVIDIA's device files on this node, where Paddle was built for CPUs alone and nobody hides them."""
    import paddle

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if hidden or paddle.is_compiled_with_cuda():
        return []
    return sorted(str(path) for path in DEVICES.glob("nvidia[0-9]*"))


def gpu_name() -> str:
    """Name of the first GPU, such as NVIDIA H100 80GB HBM3."""
    import paddle

    return str(paddle.device.cuda.get_device_name())


def used_mib(gpu: int) -> float | None:
    """MiB of a visible GPU that are in use, by whatever process, as its driver counts them; None: it does not tell."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run([*words, "-i", visible[gpu] if visible else str(gpu)], capture_output=True, text=True)
        return float(answer.stdout)
    except (OSError, ValueError):
        return None


def p2p_channels() -> dict[str, str]:
    """The variable for messages between stages; as the user set it, if at all."""
    return {P2P_CHANNELS: os.environ.get(P2P_CHANNELS) or CHANNELS}


def variables_of(pipelined: bool, ulysses: bool) -> dict[str, str]:
    """For ranks that train. Ulysses' all-to-alls, which are messages to NCCL, too, keep all channels."""
    return p2p_channels() if pipelined and not ulysses else {}


def slowed_by_a_receive(multiprocessors: int) -> float:
    """How many times as long a GPU computes while a receive holds some of its multiprocessors, at most half."""
    given = p2p_channels()[P2P_CHANNELS]
    channels = int(given) if given.isdecimal() else int(CHANNELS)
    return 1 / (1 - min(channels / multiprocessors, 0.5))
