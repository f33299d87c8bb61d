"""Profile files: reads, writes and checks them, and interpolates between their points.

`computation`, `memory` and `hardware` describe their files with the types of `schema`; they share `files`, and
`identity` checks the model and cluster of a file. `dialects`, with `raw_runs`, converts other programs' files;
`nccl_tests` reads nccl-tests' output. Between measured points: `compute_time`, `memory_use`, `network` by `curves`.
Without a device: `analytic` from a `data_sheet`. NCCL's model of messages is in `network`, memory outside tensors in
`reserve`.
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
