"""The profiles from which a model's prices on a cluster are computed."""

from __future__ import annotations

from dataclasses import dataclass

from ..profiles.compute_time import ComputeTimes
from ..profiles.data_sheet import Device
from ..profiles.files import ProfileFile, device_of
from ..profiles.memory_use import MemoryUse
from ..profiles.network import Network
from ..profiles.reserve import MeasuredReserve, Reserve, reserve_of


@dataclass(frozen=True, slots=True)
class Profiles:
    """One cluster and one model, measured or derived."""

    network: Network
    times: ComputeTimes
    memory: MemoryUse
    device: Device  # of every rank

    @classmethod
    def of(cls, network: Network, times: ComputeTimes, memory: MemoryUse) -> Profiles:
        """With the device that they name."""
        return cls(network, times, memory, device_of(network.profile.meta, times.profile.meta, memory.profile.meta))

    @property
    def num_nodes(self) -> int:
        return self.network.profile.num_nodes

    @property
    def gpus_per_node(self) -> int:
        return self.network.profile.gpus_per_node

    @property
    def files(self) -> tuple[ProfileFile, ...]:
        """The files that they were read from."""
        return (*self.network.profile.files, *self.times.profile.files, *self.memory.profile.files)

    @property
    def reserve(self) -> Reserve:
        """Memory of its devices besides tensors: none where no profile names a GPU."""
        measured = MeasuredReserve.of(self.network.profile.meta, self.memory.profile.meta)
        return reserve_of(self.device, self.num_nodes * self.gpus_per_node, measured)
