"""A rank's place in the mesh of a layer: its samples, its shards of weights, and the collectives at their points."""

from functools import partial
from typing import Any

import paddle

from ..model import Weight
from ..plan import LayerStrategy
from ..plan.comm_points import CommPoint, Op, comm_ops, summed_over
from ..plan.layout import token_layout
from ..plan.mesh import SHARDING, Axis, Mesh
from .groups import RankGroups
from .mappings import Crossing, GatheredProducts
from .precision import cast
from .setup import ModelSetup
from .weights import ShardedParameter, Slice, zero_parameter


class Placement:
    """This rank's place in a layer's mesh, and its groups. Shared by blocks and vocabulary layers."""

    def __init__(self, setup: ModelSetup, here: RankGroups, strategy: LayerStrategy):
        size = setup.plan.stage_size
        self.setup, self.numbers = setup, setup.numbers
        self.mesh: Mesh = strategy.mesh(size)
        self.local = here.local
        self.tp = strategy.tp  # ranks that split the weights
        self.index = self.mesh.index(self.local, Axis.TENSOR)  # index of this rank's part of them
        self.experts: Mesh = strategy.experts.mesh(size)
        self._sharding, self._experts_sharding = strategy.sharding, strategy.experts_sharding
        self._sequence_parallel = setup.plan.assumed.sequence_parallel
        self._here = here
        self._ops = {at.point: (at.op, self.group(at.axis)) for at in comm_ops(strategy.axes, self._sequence_parallel)}
        self._gathers = {point: self._ops.pop(point)[1] for point, (op, _) in [*self._ops.items()] if op is Op.GATHER}

    @property
    def samples(self) -> range:
        """Samples of a micro-batch for which this rank computes the layer, at least in part."""
        each = self.setup.plan.micro_batch // self.mesh.degree(Axis.DATA)
        first = self.mesh.index(self.local, Axis.DATA) * each
        return range(first, first + each)

    def own_samples(self, strategy: LayerStrategy) -> list[int]:
        """The sample of each token that this rank sends to experts."""
        layout = token_layout(strategy, self.mesh.size, sequence_parallel=True)
        micro_batch, seq_length = self.setup.plan.micro_batch, self.setup.seq_length
        intervals = layout.intervals(micro_batch * seq_length, micro_batch)[self.local].tolist()
        return [token // seq_length for start, stop in intervals for token in range(start, stop)]

    def group(self, *axes: Axis, mesh: Mesh | None = None) -> Any:
        """This rank's communicator along these axes of the mesh; None for one rank."""
        return self._here.of_stage((mesh or self.mesh).group(self.local, *axes))

    def parts(self, mesh: Mesh, sharding: int | None) -> dict[str, Any]:
        """Communicators of a weight that ZeRO shards over a subset of the ranks that hold it; empty otherwise."""
        if sharding is None:
            return {}
        parted = mesh.parted(sharding)
        names = {"shard_group": Axis.SHARDS, "replica_group": Axis.REPLICAS}
        return {name: self.group(axis, mesh=parted) for name, axis in names.items()}

    def slice_of(self, weight: Weight) -> Slice:
        """The part of a weight of this layer that the rank holds."""
        tp, index = self.tp, self.index
        if weight.expert is not None:
            tp = self.experts.degree(Axis.EXPERT_TENSOR)
            index = self.experts.index(self.local, Axis.EXPERT_TENSOR)
        if weight.axis is None or tp == 1:
            return Slice()
        parts = weight.parts(tp)  # fewer than ranks if neighbours share a kv head
        padded = weight.padded_length(tp) if weight.padded else None
        return Slice(weight.axis, index * parts // tp, parts, padded)

    def parameter(self, weight: Weight, prefix: str) -> ShardedParameter:
        """This rank's part of a weight of this layer, with its sum group and the number of ranks that hold it."""
        name, shape, weight_slice = prefix + weight.name, weight.shape, self.slice_of(weight)
        dtype = "float32" if weight.state else self.numbers.stored.dtype
        tensor = zero_parameter(weight_slice.size(shape), dtype)  # placeholder until its unit is made
        made = partial(ShardedParameter, name, shape, weight_slice, tensor, source=self.setup.source)
        if weight.expert is not None:
            copied = weight.axis is None  # a factor of its adapters
            return made(
                self.group(Axis.EXPERT_DATA, mesh=self.experts),
                replicas=self.experts.degree(Axis.EXPERT_DATA, *([Axis.EXPERT_TENSOR] if copied else [])),
                first_copy=not copied or self.experts.index(self.local, Axis.EXPERT_TENSOR) == 0,
                gradient_dtype=self.numbers.gradients.dtype,
                presum_group=self.group(Axis.EXPERT_TENSOR, mesh=self.experts) if copied else None,
                expert=True,
                **self.parts(self.experts, self._experts_sharding),
            )
        summed = summed_over(weight.split, self._sequence_parallel)
        copies = None
        if weight.sharded and Axis.TENSOR in summed:  # a projection to latents
            summed, copies = SHARDING, self.group(Axis.TENSOR)
        sum_group = self.group(*summed)  # its ranks hold the same part
        if weight_slice.axis is not None and weight_slice.parts < self.tp:  # kv heads that several ranks share
            copies = self.group(Axis.COPIES, mesh=self.mesh.sharing(self.tp // weight_slice.parts))
        return made(
            sum_group,
            replicas=self.mesh.size // weight_slice.parts,
            first_copy=Axis.TENSOR in summed or self.index % (self.tp // weight_slice.parts) == 0,
            gradient_dtype=dtype if weight.state else self.numbers.gradients.dtype,
            presum_group=copies,
            state=weight.state,
            sharded=weight.sharded,
            **self.parts(self.mesh, self._sharding),
        )

    def cross(self, point: CommPoint, x: Any) -> Any:
        """Communicate tokens at a point; differentiable. Messages have the stored type. `products` communicates tokens
        that are gathered for products."""
        if point not in self._ops:
            return x
        op, group = self._ops[point]
        return cast(Crossing.apply(cast(x, self.numbers.sent.dtype), op, group), self.numbers.computed.dtype)

    def gathered(self, point: CommPoint, x: Any) -> Any:
        """The tokens at a point; those of all ranks if gathered for products that need them once."""
        if not self.gathers(point):
            return self.cross(point, x)
        whole = Crossing.apply(cast(x, self.numbers.sent.dtype), Op.GATHER, self._gathers[point])
        return cast(whole, self.numbers.computed.dtype)

    def gathers(self, point: CommPoint) -> bool:
        """Whether tokens are gathered for the products behind a communication point."""
        return point in self._gathers

    def products(self, point: CommPoint, keeps: bool, x: Any, *matrices: Any, transposed: bool = False) -> Any:
        """A rank's tokens, communicated at a point and multiplied with matrices; see `GatheredProducts`."""
        if not self.gathers(point):
            x = self.cross(point, x)
            return tuple(paddle.matmul(x, matrix, transpose_y=transposed) for matrix in matrices)
        return GatheredProducts.apply(x, self._gathers[point], self.numbers, keeps, transposed, *matrices)
