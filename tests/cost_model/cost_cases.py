"""Plans of every kind on four ranks with a model large enough that its tensors, not its scalars, fill memory."""

from dataclasses import dataclass, replace

from distributed.plans import (
    CONTEXT_FOUR,
    EXPERTS_FOUR,
    EXPERTS_LATE,
    FOUR,
    HYBRID_FOUR,
    INTERLEAVED_FOUR,
    KINDS_FOUR,
    MTP_FOUR,
    PARTS_FOUR,
    ZERO,
)

from paddlenlp_galvatron.plan import ModelShape, Plan, Precision

RANKS = 4
SEQ = 64


@dataclass(frozen=True)
class RealCase:
    """A plan to be run, and the model."""

    name: str
    plan: Plan
    shape: ModelShape
    adapter_rank: int | None = None  # of adapters, which alone learn


def real_cases() -> list[RealCase]:
    """The parity tests' plans on four ranks; those of ZeRO in bf16 as well, some with norms of q and k, half of them
    with adapters."""
    normed = [replace(named, name=f"{named.name}, qwen3", family="qwen3") for named in FOUR[:2] + FOUR[-1:] + ZERO[-3:]]
    experts = {"experts": 8, "experts_per_token": 2, "expert_size": 192, "router_aux_loss_coef": 0.01}
    dense = FOUR + ZERO + normed + INTERLEAVED_FOUR + PARTS_FOUR + CONTEXT_FOUR + HYBRID_FOUR
    pieces = [
        replace(one, name=f"{one.name}, 3 pieces", plan=replace(one.plan, vocab=replace(one.plan.vocab, pieces=3)))
        for one in (*FOUR[:3], *ZERO[4:7], *ZERO[8:10])
    ]
    mtp = [replace(named, family="glm4_moe", tied=False) for named in MTP_FOUR]
    experts_of = EXPERTS_FOUR[:-1] + EXPERTS_LATE + KINDS_FOUR[1:]
    cases = [(named, Precision.FP32, None) for named in experts_of + mtp + dense + pieces]
    cases += [(named, Precision.BF16, None) for named in ZERO + PARTS_FOUR[1:2]]
    adapted = [*dense[::2], *(one for one in dense[1::2] if one.kv_heads), *experts_of[::2]]
    cases += [(named, Precision.FP32, 8) for named in adapted]
    return [
        RealCase(
            f"{named.name}, {precision}, adapters of rank {rank}",
            replace(
                named.plan,
                global_batch=2 * named.plan.global_batch,
                assumed=replace(named.plan.assumed, seq_length=SEQ, mixed_precision=precision),
            ),
            ModelShape(
                name="probe",
                family=named.family,
                layers=len(named.plan.layers),
                hidden_size=256,
                intermediate_size=704,
                heads=8,
                kv_heads=named.kv_heads or 4,
                vocab_size=2000,
                max_position_embeddings=SEQ,
                tied_embeddings=named.tied,
                own_head_dim=64 if named.family == "qwen3" else None,
                **(experts if named.family.endswith("moe") or "experts" in named.name else {}),
                dense_layers=named.dense,
                mtp_layers=int(named.mtp),
                shared_size=352 if named.family == "qwen2_moe" else 0,
            ),
            rank,
        )
        for named, precision, rank in cases
    ]
