"""The GPUs of this node, as seen by Paddle and by the system, and our defaults for NCCL."""

import os
import subprocess
from pathlib import Path

DEVICES = Path("/dev")
P2P_CHANNELS = "NCCL_MAX_P2P_NCHANNELS"
# A posted receive is a kernel that occupies the GPU, one block per channel, until the message arrives. With NCCL's 16
# to 32 channels within a node it occupies up to a quarter of an H100's 132 multiprocessors; between nodes NCCL uses
# about 2. How much slower messages are with 4 is not known yet.
CHANNELS = "4"
# Paddle's variable for the version of flash attention: 2, or 3, where GPU and Paddle have it.
FLASH_VERSION, THIRD = "FLAGS_flash_attn_version", "3"
HOPPER, FIRST_WITH_THIRD = 9, (3, 2)  # compute capability, Paddle
CORES = 4  # host cores per rank: Python, NCCL's proxy, Paddle's threads, the data
ON_GPUS = {
    # NCCL opens all connections when it creates a communicator, none within a step at the first call of a kind.
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_DEBUG": "WARN",  # its errors give no reason; the log has it
    # Sums the embedding's gradient 32 tokens at a time in fp32. One by one in 16 bits, a token that is half of the text
    # loses most of its sum (Paddle's embedding_grad.h).
    "FLAGS_embedding_deterministic": "1",
    # Locks only the requested host memory. Paddle's other allocator first locks 1/512 of the host's memory on every
    # rank: 4 GiB each with 2 TiB. Read once, when Paddle creates its allocators.
    "FLAGS_use_auto_growth_pinned_allocator": "1",
}


def gpu_count() -> int:
    """GPUs of this node that Paddle can use."""
    import paddle

    return int(paddle.device.cuda.device_count()) if paddle.is_compiled_with_cuda() else 0


def unused_gpus() -> list[str]:
    """NVIDIA's device files on this node, if Paddle was built only for CPUs and the GPUs are not hidden."""
    import paddle

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if hidden or paddle.is_compiled_with_cuda():
        return []
    return sorted(str(path) for path in DEVICES.glob("nvidia[0-9]*"))


def visible_gpus() -> list[str]:
    """Names of the GPUs in CUDA_VISIBLE_DEVICES; empty if unset."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def few_cores(cores: int, ranks: int) -> str:
    """A warning if so many ranks on GPUs would wait for this node's cores; else ""."""
    if cores >= CORES * ranks:
        return ""
    return f"{cores} cores for {ranks} ranks on GPUs, which need {CORES} each; Slurm: --cpus-per-task, docker: --cpus"


def gpu_name() -> str:
    """Name of the first GPU, such as NVIDIA H100 80GB HBM3."""
    import paddle

    return str(paddle.device.cuda.get_device_name())


def has_flash_attention_3() -> bool:
    """Whether Paddle has FlashAttention 3 on this process's GPU."""
    import paddle

    version = tuple(map(int, paddle.__version__.split(".")[:2]))
    return gpu_count() > 0 and version >= FIRST_WITH_THIRD and paddle.device.cuda.get_device_capability()[0] == HOPPER


def used_mib(gpu: int) -> float | None:
    """MiB of a visible GPU in use by all processes, by its driver; None: not reported."""
    visible = visible_gpus()
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run([*words, "-i", visible[gpu] if visible else str(gpu)], capture_output=True, text=True)
        return float(answer.stdout)
    except (OSError, ValueError):
        return None


def p2p_channels() -> dict[str, str]:
    """The user's value of the variable for messages between stages; None: not set."""
    return {P2P_CHANNELS: os.environ.get(P2P_CHANNELS) or CHANNELS}


def defaults(limit_channels: bool = False) -> dict[str, str]:
    """Variables of a rank's kernels and NCCL that the user has not set. `limit_channels`: ranks exchange messages
    between stages alone. All-to-alls are messages to NCCL, too, and keep all channels."""
    wanted = ON_GPUS | (p2p_channels() if limit_channels else {})
    return {name: value for name, value in wanted.items() if name not in os.environ}


def set_defaults(limit_channels: bool = False) -> None:
    """Set `defaults` in this rank before its first communicator, as only our launcher sets them. On CPUs they have no
    effect and are not set."""
    import paddle

    if not gpu_count():
        return
    for name, value in defaults(limit_channels).items():
        os.environ[name] = value
        if name.startswith("FLAGS_"):
            paddle.set_flags({name: int(value)})


def slowed_by_a_receive(multiprocessors: int) -> float:
    """Slowdown of a GPU's computation while a receive occupies some of its multiprocessors, at most half."""
    setting = p2p_channels()[P2P_CHANNELS]
    channels = int(setting) if setting.isdecimal() else int(CHANNELS)
    return 1 / (1 - min(channels / multiprocessors, 0.5))
