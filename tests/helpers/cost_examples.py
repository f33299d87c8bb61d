"""A small cluster and model with round numbers, for tests of the cost model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paddlenlp_galvatron.cost_model import CostModel, CostOptions, LayerCost, StageSetting
from paddlenlp_galvatron.cost_model.costs import Profiles
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, ModelShape, Plan, Precision, VocabStrategy
from paddlenlp_galvatron.profiles import Collective, ComputationProfile, HardwareProfile, MessageGroup, Shape
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.profiles.memory import LayerMemory, MemoryProfile, Variant, VocabMemory, VocabVariant
from paddlenlp_galvatron.profiles.memory_use import MemoryUse
from paddlenlp_galvatron.profiles.network import Network

MODEL = ModelShape("example", "llama", 4, 1024, 4096, 16, 8, 32000, 4096)
SEQ = 512
ASSUMED = Assumptions(sequence_parallel=True, mixed_precision=Precision.BF16, seq_length=SEQ)

HARDWARE = HardwareProfile(
    num_nodes=2,
    gpus_per_node=4,
    # Inside a node 100 MiB/ms; the node's link carries 10, which all groups that cross it share.
    allreduce_mib_per_ms={(8, True): 10, (4, True): 100, (4, False): 5, (2, True): 100, (2, False): 2.5},
    p2p_mib_per_ms={2: 2.5, 4: 2.5, 8: 2.5},
    overlap_coe=1.2,
)
LAYER_MIB = MODEL.layer_parameters * 4 / 2**20
TABLE_MIB = MODEL.vocab_size * MODEL.hidden_size * 16 / 2**20
BATCHES = (1, 2, 4, 8, 16)

COMPUTATION = ComputationProfile(
    dtype="bf16",
    hidden_size=1024,
    heads=16,
    layer_ms={0: {Shape(b, SEQ): (0.1 + 0.4 * b) / b for b in BATCHES}},  # 0.1 ms and 0.4 ms a sample
    other_ms={Shape(b, SEQ): (0.2 + 0.8 * b) / b for b in BATCHES},
)


def _layer(split_only: bool) -> LayerMemory:
    """40 MiB a sample, of which 10 stay whole on every rank without Megatron-SP."""
    return LayerMemory(LAYER_MIB, {t: 40 / t if split_only else 10 + 30 / t for t in (1, 2, 4, 8)}, checkpoint_mib=1.0)


def _vocab(tables: int, activation_mib: float) -> dict[int, VocabMemory]:
    degrees = (1, 2, 4, 8)
    return {SEQ: VocabMemory({t: tables * TABLE_MIB / t for t in degrees}, {t: activation_mib / t for t in degrees})}


MEMORY = MemoryProfile(
    dtype="bf16",
    hidden_size=1024,
    heads=16,
    layers={Variant(0, sp): {SEQ: _layer(sp)} for sp in (True, False)},
    vocab={
        VocabVariant(role, sp): _vocab(tables, activation)
        for role, tables, activation in (("only", 2, 200.0), ("first", 1, 2.0), ("last", 1, 198.0))
        for sp in (True, False)
    },
)


def example(
    *,
    num_nodes: int = 2,
    gpus_per_node: int = 4,
    model: ModelShape | Sequence[ModelShape] = MODEL,
    hardware: HardwareProfile = HARDWARE,
    computation: ComputationProfile = COMPUTATION,
    memory: MemoryUse | None = None,
    options: CostOptions = CostOptions(),
    **assumed: Any,
) -> CostModel:
    """The cost model of the example, assumptions changed as given."""
    hardware = replace(hardware, num_nodes=num_nodes, gpus_per_node=gpus_per_node)
    profiles = Profiles.of(Network(hardware), ComputeTimes(computation), memory or MemoryUse(MEMORY))
    return CostModel(model, profiles, replace(ASSUMED, **assumed), options)


def one_node(**changed: Any) -> CostModel:
    """The example on one node of 8, where each message costs a fixed 0.05 ms and 0.01 ms a MiB, of any kind."""
    times = {1.0: 0.06, 1024.0: 0.05 + 10.24}
    messages = {MessageGroup(kind, size): times for kind in Collective for size in (2, 4, 8)}
    hardware = HardwareProfile(1, 8, {(8, True): 100}, {2: 50, 4: 50, 8: 50}, messages, overlap_coe=1.2)
    return example(**{"num_nodes": 1, "gpus_per_node": 8, "hardware": hardware, **changed})


NARROW = replace(MODEL, name="two types", layers=2)
WIDE = replace(NARROW, hidden_size=2048, heads=32, kv_heads=16, intermediate_size=8192, seq_length=SEQ // 4)


def two_types(model: Sequence[ModelShape] = (NARROW, WIDE), **changed: Any) -> CostModel:
    """The example's layers and embedding, then layers and LM head twice as wide that see a quarter of the tokens."""
    lengths = (SEQ, SEQ // 4)
    computation = replace(
        COMPUTATION,
        layer_ms={
            kind: {Shape(b, seq): (1 + kind) * (0.1 + 0.4 * b) / b for b in BATCHES} for kind, seq in enumerate(lengths)
        },
        other_ms={Shape(b, seq): (0.2 + seq / SEQ * b) / b for b in BATCHES for seq in lengths},
    )
    wide_mib = WIDE.layer_parameters * 4 / 2**20
    layers = {
        Variant(kind, sp): {seq: replace(_layer(sp), parameter_mib=(LAYER_MIB, wide_mib)[kind])}
        for kind, seq in enumerate(lengths)
        for sp in (True, False)
    }
    vocab = {variant: dict.fromkeys(lengths, by_length[SEQ]) for variant, by_length in MEMORY.vocab.items()}
    memory = MemoryUse(replace(MEMORY, layers=layers, vocab=vocab))
    return one_node(**{"model": model, "computation": computation, "memory": memory, **changed})


def example_plan(model: CostModel, **changed: Any) -> Plan:
    """Four layers of one strategy in one stage on the model's cluster, changed as given."""
    stages = changed.pop("stages", (MODEL.layers,))
    fields: dict[str, Any] = {
        "world_size": model.world_size, "global_batch": 32, "micro_batches": 2, "stages": stages,
        "layers": (LayerStrategy(),) * MODEL.layers, "vocab": VocabStrategy(), "assumed": model.assumed,
    }  # fmt: skip
    return Plan(**{**fields, **changed})


def cost(
    model: CostModel, strategy: LayerStrategy, micro_batch: int = 16, micro_batches: int = 2, pipeline: int = 1
) -> LayerCost:
    """`layer_cost` on the stages of a pipeline over the whole cluster."""
    stage = StageSetting(model.world_size // pipeline, micro_batch, micro_batches, pipeline)
    return model.layer_cost(strategy, stage)
