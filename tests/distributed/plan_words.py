"""Layer-wise plans from a few words, and the small models that try them."""

import re
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Literal

from paddlenlp_galvatron.check.parity.parity import VOCABULARY, Case, small_case
from paddlenlp_galvatron.model import FAMILIES
from paddlenlp_galvatron.plan import Recompute, Schedule
from paddlenlp_galvatron.plan.check import require_valid
from paddlenlp_galvatron.plan.precision import Precision
from paddlenlp_galvatron.plan.strategy import Assumptions, DataParallel, LayerStrategy, Plan, VocabStrategy


def layers(code: str, default: DataParallel = DataParallel.DDP) -> tuple[LayerStrategy, ...]:
    """Strategies from words: "1 2r 2u 4sz 2c4" is 5 layers.

    A word is a degree, c and that of context parallelism next to it, then u = Ulysses, s = strided groups,
    r = recompute, of n = norms, a = attention, m = MLP alone, z = zero3 instead of the default type; h and the ranks
    over which ZeRO shards.
    """
    parts = {"r": Recompute.FULL, "n": Recompute.NORMS, "a": Recompute.ATTENTION, "m": Recompute.MLP}
    return tuple(
        LayerStrategy(
            int(degree),
            ulysses="u" in flags,
            consecutive="s" not in flags,
            dp_type=DataParallel.ZERO3 if "z" in flags else default,
            recompute=reduce(or_, (parts[letter] for letter in flags if letter in parts), Recompute.NONE),
            context=int(context or 1),
            sharding=int(sharding) if sharding else None,
        )
        for degree, context, flags, sharding in re.findall(r"(\d+)(?:c(\d+))?([usrnamz]*)(?:h(\d+))?", code)
    )


WORDS = 61  # a vocabulary
SEED = 330  # with which few words fill some ranks of experts and leave others empty


@dataclass(frozen=True)
class Named:
    """A plan, its purpose, and the model and optimizer that try it.

    `dense`: layers without experts. `vocabulary`: with two words some experts get no rows. In bf16 the gradients of
    such a model, which cancel out soon, differ by 0.2 without experts, too.
    """

    name: str
    plan: Plan
    family: str = "llama"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    tied: bool = False
    kv_heads: int | None = None
    dense: tuple[int, ...] = ()
    vocabulary: int | None = None
    mtp: bool = False

    def case(self, steps: int | None = None) -> Case:
        """With enough steps for all of an optimizer's states: AdamW's moments build up after the second."""
        mixture = FAMILIES[self.family].mixture
        return small_case(
            self.plan,
            self.family,
            self.optimizer,
            steps or (3 if self.optimizer == "adamw" else 2),
            SEED if mixture else 0,
            tied=self.tied,
            kv_heads=self.kv_heads,
            vocabulary=self.vocabulary or (WORDS if mixture else VOCABULARY),
            dense_layers=self.dense,
            mtp_layers=int(self.mtp),
        )


def plan(
    world_size: int,
    code: str,
    stages: tuple[int, ...] | None = None,
    *,
    vocab: str = "1",
    micro_batches: int = 2,
    batch: int = 8,
    megatron_sp: bool = True,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    default: DataParallel = DataParallel.DDP,
    async_reduce: bool = True,
    chunks: int = 1,
) -> Plan:
    strategies = layers(code, default)
    [head] = layers(vocab, default)
    made = Plan(
        world_size=world_size,
        global_batch=batch,
        micro_batches=micro_batches,
        stages=stages or (len(strategies),),
        layers=strategies,
        vocab=VocabStrategy(head.degree, head.ulysses, head.dp_type, head.sharding, context=head.context),
        default_dp_type=default,
        schedule=schedule,
        chunks=chunks,
        assumed=Assumptions(sequence_parallel=megatron_sp, async_grad_reduce=async_reduce),
    )
    require_valid(made)
    return made


def named(
    name: str,
    model: str,
    world_size: int,
    words: str,
    experts: str = "",
    *,
    batch: str = "8/2",
    precision: Precision = Precision.FP32,
    kv_heads: int | None = None,
    dense: tuple[int, ...] = (),
    vocabulary: int | None = None,
    **others: Any,
) -> Named:
    """A plan in one line: "[2] 1 2r | 2 || 1 | 1" has a vocabulary of tp 2 and two chunks of each of two stages.

    `model`: its family, and adamw, tied, mtp where they hold. `experts`: words of `having`. `batch`: global batch size
    and micro-batches. `others`: arguments of `plan`.
    """
    family, *flags = model.split(", ")
    vocab, code = words[1:].split("] ") if words.startswith("[") else ("1", words)
    chunks = [part.split("|") for part in code.split("||")]
    stages = tuple(len(layers(part)) for parts in chunks for part in parts)
    others |= dict(zip(("batch", "micro_batches"), map(int, batch.split("/")), strict=True))
    made = plan(world_size, code, stages, vocab=vocab, chunks=len(chunks), **others)
    made = in_16_bits(having(made, experts) if experts else made, precision)
    optimizer: Literal["sgd", "adamw"] = "adamw" if "adamw" in flags else "sgd"
    return Named(name, made, family, optimizer, "tied" in flags, kv_heads, dense, vocabulary, "mtp" in flags)


def having(plan: Plan, code: str, dense: tuple[int, ...] = ()) -> Plan:
    """The plan with experts by words, a layer each: "4 2x2 1zh2" is ep 4, ep 2 with tp 2, whole experts under zero3
    that is sharded over 2 ranks. `dense` layers have none."""
    words = re.findall(r"(\d+)(?:x(\d+))?(z?)(?:h(\d+))?", code)
    made: list[LayerStrategy] = []
    for index, (layer, (ep, etp, sharded, size)) in enumerate(zip(plan.layers, words, strict=True)):
        if index in dense:
            made.append(layer)
            continue
        dp_type = DataParallel.ZERO3 if sharded else plan.default_dp_type
        sharding = int(size) if size else None
        made.append(replace(layer, ep=int(ep), etp=int(etp or 1), experts_dp_type=dp_type, experts_sharding=sharding))
    return replace(plan, layers=tuple(made))


def in_16_bits(of: Plan, precision: Precision = Precision.BF16) -> Plan:
    return replace(of, assumed=replace(of.assumed, mixed_precision=precision))
