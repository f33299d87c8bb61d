"""Units. Bytes are counted in MiB and GiB, times in ms, bandwidths in MiB/ms."""

from typing import Final

MIB: Final = 2**20  # bytes
GIB: Final = 2**30  # bytes
GIB_MIB: Final = 1024  # MiB of a GiB
GB_PER_S: Final = 1e9 / MIB / 1e3  # MiB/ms in one GB/s
MS_PER_S: Final = 1000.0
US_PER_MS: Final = 1000.0
NS_PER_MS: Final = 1e6
FP32_BYTES: Final = 4  # bytes of one number
