"""Profile files: read, written, checked; curves through them.

`computation`, `memory` and `hardware` describe their files in the words of `schema`; `files` is common to them,
`identity` says what a file was measured on. `dialects`, with `raw_runs`, turns other programs' files into this form;
`nccl_tests` reads nccl-tests' output. Between measured points: `compute_time`, `memory_use`, `network` by `curves`.
Without a device: `analytic` from a `data_sheet`; NCCL's own model of messages is in `network`, memory in `reserve`.
"""

from .computation import (
    EMBEDDING,
    HEAD,
    NOTHING,
    CommPointKey,
    CommPointTimes,
    ComputationProfile,
    PassKey,
    PassTimes,
    Shape,
    layer_part,
)
from .data_sheet import Device, load_data_sheet
from .files import Fingerprint, Meta, ProfileFile
from .hardware import Collective, HardwareProfile, MessageGroup
from .memory import LayerMemory, MemoryProfile, Variant, VocabMemory, VocabVariant
from .reserve import Reserve
