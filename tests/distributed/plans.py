"""Layer-wise plans for the parity tests, as lists of named cases."""

from __future__ import annotations

from paddlenlp_galvatron.plan import DataParallel, Precision, Schedule

from .plan_words import SEED, WORDS, Named, having, in_16_bits, interleaved, plan

__all__ = ["SEED", "WORDS", "Named", "having", "in_16_bits", "interleaved", "plan"]

TWO = [
    Named("tp 1-2 with Megatron-SP, recompute", plan(2, "1 2r 2 1r", vocab="2"), "qwen2"),
    Named("tp 1-2 without Megatron-SP", plan(2, "1 2r 2 1", vocab="2", megatron_sp=False), "llama", "adamw"),
    Named("two stages, 1F1B, more micro-batches than stages", plan(2, "1 1r 1", (1, 2), micro_batches=4), "qwen2"),
    Named("Ulysses with dp, vocabulary by sequence", plan(2, "2u 1 2ur", vocab="2u"), "llama"),
]
FOUR = [
    Named("tp 1-2-4 with Megatron-SP", plan(4, "1 2r 4 2", vocab="4"), "qwen2"),
    Named("tp 1-2-4 without Megatron-SP", plan(4, "1 2r 4 2 1", vocab="2", megatron_sp=False), "llama"),
    Named("uneven stages, tp with Megatron-SP", plan(4, "1 2r 2 1 2", (2, 3), vocab="2", micro_batches=4), "qwen2"),
    Named(
        "GPipe, uneven stages, tp without Megatron-SP, plain vocabulary",
        plan(4, "1 2r 2 1 2", (3, 2), micro_batches=4, megatron_sp=False, schedule=Schedule.GPIPE),
        "llama",
        "adamw",
    ),
    Named("four stages, fewer micro-batches than stages", plan(4, "1 1r 1 1 1", (1, 2, 1, 1), batch=4), "llama"),
    Named("strided tp with Megatron-SP", plan(4, "2s 2 2sr 1", vocab="2"), "qwen2"),
    Named("strided tp without Megatron-SP", plan(4, "2s 2 2sr 4", vocab="2", megatron_sp=False), "qwen2", "adamw"),
    Named("Ulysses, tp and dp mixed", plan(4, "2u 2 4ur 1", vocab="4", megatron_sp=False), "qwen2"),
]
ZERO = [
    Named("zero3 with ddp", plan(4, "1z 1 1zr 1z", vocab="1z"), "qwen2"),
    Named(
        "zero2 of one micro-batch", plan(4, "1 1r 2", vocab="2", micro_batches=1, default=DataParallel.ZERO2), "llama"
    ),
    Named(
        "zero2 and zero3 under tp, AdamW", plan(4, "2 2z 1zr", vocab="2z", default=DataParallel.ZERO2), "qwen2", "adamw"
    ),
    Named("zero3 over Ulysses", plan(4, "2uz 4uz 1z 2", vocab="2uz", megatron_sp=False), "qwen2"),
    Named("zero3 in a pipeline", plan(4, "1z 1zr 2 1z", (2, 2), vocab="1z", micro_batches=4), "llama", "adamw"),
    Named(
        "reduced every micro-batch: ddp, zero3",
        plan(4, "1 1z 2 2zr", (2, 2), vocab="2", micro_batches=4, async_reduce=False),
        "qwen2",
    ),
    Named(
        "reduced every micro-batch: zero2", plan(4, "1 2 2r", default=DataParallel.ZERO2, async_reduce=False), "llama"
    ),
    Named("tied, one stage", plan(4, "1 2", vocab="2"), "qwen2", tied=True),
    Named("tied and zero3, one stage", plan(4, "1z 2", vocab="2z"), "ernie4_5", "adamw", tied=True),
    Named("tied across stages", plan(4, "1 2", (1, 1), vocab="2", micro_batches=4), "qwen2", tied=True),
    Named("tied across stages, zero2", plan(4, "1 2", (1, 1), default=DataParallel.ZERO2), "llama", tied=True),
    Named("fewer kv heads than tp", plan(4, "4 4r 2", vocab="4"), "qwen2", kv_heads=2),
    Named("one kv head, tp without Megatron-SP, zero3", plan(4, "4 2z 1", megatron_sp=False), "llama", kv_heads=1),
    Named("fewer kv heads than Ulysses", plan(4, "4u 2uz 4ur"), "qwen2", kv_heads=2),
]
CONTEXT_FOUR = [
    Named("cp 2, grouped kv heads, recompute", plan(4, "1c2 1c2r 1"), "qwen2"),
    Named("cp 4, the vocabulary, too", plan(4, "1c4 1c4r 1c4", vocab="1c4", batch=4), "llama"),
    Named("cp with tp with Megatron-SP, norms of heads", plan(4, "2c2 2c2r 4 1c4", vocab="2c2"), "qwen3"),
    Named("cp with tp without Megatron-SP", plan(4, "2c2 2c2r 1c2 2", vocab="2", megatron_sp=False), "llama"),
    Named("cp with Ulysses", plan(4, "2c2u 4u 2c2ur 1c2", vocab="2c2u"), "ernie4_5"),
    Named("fewer kv heads than ranks that split them", plan(4, "2c2 2c2u 1c4"), "llama", kv_heads=1),
    Named("strided cp, with tp and alone", plan(4, "2c2s 1c2s 1c2 2s", vocab="2"), "qwen2"),
    Named("cp under zero2 and zero3", plan(4, "1c2 1c4z 2c2zr 1z", vocab="1c2z", default=DataParallel.ZERO2), "qwen2"),
    Named("cp under zero3, reduced every micro-batch", plan(4, "1c2z 1c4 2c2z", async_reduce=False), "ernie4_5"),
    Named("cp in a pipeline, tied", plan(4, "1c2 2r 1c2r 1", (2, 2), micro_batches=4), "ernie4_5", tied=True),
    Named(
        "cp in an interleaved pipeline",
        plan(4, "1c2 1c2r 2 1c2z", (1, 1, 1, 1), vocab="1c2", micro_batches=3, batch=6, chunks=2),
        "llama",
    ),
    Named("cp under AdamW", plan(4, "1c2z 2c2r 1c4", vocab="2"), "qwen2", "adamw"),
    Named("cp with parts recomputed", plan(4, "1c2a 2c2nm 1c4na 2c2ma", vocab="2c2"), "qwen2", kv_heads=4),
    Named(
        "cp, parts, 3 chunks, zero2",
        plan(
            4,
            "1c2a 2nm 1c2zm 1nam 2r 1c2na",
            (1,) * 6,
            vocab="1c2",
            micro_batches=4,
            default=DataParallel.ZERO2,
            chunks=3,
        ),
        "qwen3",
    ),
]
CONTEXT_EIGHT = [
    Named("cp 2, 4, 8 with tp", plan(8, "2c4 4c2r 1c8 2c2z 8", vocab="2c4"), "qwen2"),
    Named("cp with tp and Ulysses, two stages", plan(8, "2c2 2c2ur 1c4 4", (2, 2), vocab="4"), "qwen3"),
    Named("parts, tp 2-8, Ulysses", plan(8, "2nam 8nm 4ua 1m", vocab="8", batch=16), "llama"),
    Named(
        "cp, parts, 2 chunks, zero3",
        plan(8, "1c4a 2c2nm 4ma 2c2zr 1znam 2c2u", (1, 2, 1, 2), vocab="2c2", micro_batches=3, batch=12, chunks=2),
        "qwen2",
    ),
    Named(
        "cp, parts, 2 chunks of four stages, plain tp",
        plan(
            8,
            "1c2n 2a 1c2m 2nam 1c2r 2nm 1c2 1a",
            (1,) * 8,
            vocab="1c2",
            micro_batches=6,
            batch=12,
            megatron_sp=False,
            chunks=2,
        ),
        "llama",
        "adamw",
    ),
    Named(
        "strided, without Megatron-SP",
        plan(8, "2c2s 4c2 1c2s 2c4r", vocab="8", megatron_sp=False),
        "llama",
    ),
]
# ZeRO in a part of the ranks that hold the same weights.
HYBRID_FOUR = [
    Named("zero2 and zero3 in parts", plan(4, "1zh2 1h2 1z 1zrh2", vocab="1zh2", default=DataParallel.ZERO2), "qwen2"),
    Named(
        "in parts, AdamW, tied",
        plan(4, "1zh2 1h2 2r", vocab="1h2", default=DataParallel.ZERO2),
        "llama",
        "adamw",
        tied=True,
    ),
    Named(
        "in parts, reduced every micro-batch",
        plan(4, "1zh2 1h2 1", vocab="1zh2", batch=12, micro_batches=3, default=DataParallel.ZERO2, async_reduce=False),
        "qwen2",
        tied=True,
    ),
    Named(
        "in parts over Ulysses and cp",
        plan(4, "2uzh2 4uh2 1c2h2 2c2u", vocab="2uzh2", default=DataParallel.ZERO2),
        "qwen2",
        kv_heads=2,
    ),
]
HYBRID_EIGHT = [
    Named(
        "in parts of 2 and 4 with tp",
        plan(8, "2zh2 1h4 1zh2 2sh2 2rzh2", vocab="2zh2", batch=16, default=DataParallel.ZERO2),
        "qwen2",
    ),
    Named(
        "in parts, two uneven stages, tied",
        plan(8, "1zh2 1h2 2 1zrh2", (1, 3), vocab="1h2", micro_batches=4, batch=16, default=DataParallel.ZERO2),
        "llama",
        "adamw",
        tied=True,
    ),
    Named(
        "in parts, 2 chunks, reduced every micro-batch",
        plan(
            8,
            "1zh2 2 1h2 1zh2",
            (1,) * 4,
            vocab="1zh2",
            micro_batches=3,
            batch=12,
            default=DataParallel.ZERO2,
            async_reduce=False,
            chunks=2,
        ),
        "qwen2",
    ),
]
SIX = [
    Named(
        "in parts of 2 and 3",
        plan(6, "1zh2 1h3 1c3zh3 1c3h2 2h3", vocab="1h2", batch=12, default=DataParallel.ZERO2),
        "qwen2",
        "adamw",
    ),
    Named("cp 3 and 6", plan(6, "1c3 2c3r 1c6 3c2u", vocab="3", batch=12), "llama"),
    Named("parts, 3-way and 6-way tp", plan(6, "3nam 6nm 2ua 1m", vocab="3", batch=12), "qwen2"),
    Named(
        "cp 3, parts, 2 chunks",
        plan(6, "1c3na 3m 1c3zr 3nam", (1,) * 4, vocab="1c3", micro_batches=3, batch=9, chunks=2),
        "llama",
    ),
    Named(
        "cp, parts, 2 chunks of three stages, tied",
        plan(6, "1c2a 2nm 1m 2nam 1c2n 2r 1c2ma", (1, 1, 1, 2, 1, 1), vocab="2", micro_batches=4, chunks=2),
        "qwen2",
        tied=True,
    ),
    Named("3-way and 6-way tp", plan(6, "3 6r 2 1", vocab="3", batch=12), "llama"),
    Named(
        "three stages, 2-way Ulysses",
        plan(6, "2u 1 2r 2", (1, 1, 2), vocab="2", micro_batches=3, batch=12),
        "qwen2",
    ),
]
EIGHT = [
    Named("tp 1-8 and back", plan(8, "1 2 4r 8 1", vocab="8", batch=16), "llama"),
    Named(
        "two stages of four, all mixed",
        plan(8, "1 2r 4 2u 4sr 1", (3, 3), vocab="2", micro_batches=4, batch=16, megatron_sp=False),
        "qwen2",
    ),
    Named(
        "four stages of two",
        plan(8, "2 1 2r 1 1", (1, 1, 1, 2), vocab="2", micro_batches=4, batch=16),
        "qwen2",
        "adamw",
    ),
]


# Rounds of micro-batches that are full, longer, and shorter than there are stages.
INTERLEAVED_TWO = [
    Named("2 chunks", interleaved(2, "1 1r 1 1 1", (1, 2, 1, 1), 2, micro_batches=4), "qwen2"),
    Named("3 chunks, 5 micro-batches", interleaved(2, "1 1r 1 1 1r 1", (1,) * 6, 3, micro_batches=5, batch=5), "llama"),
    Named(
        "2 chunks, tied, reduced every micro-batch",
        interleaved(2, "1 1 1 1r", (1,) * 4, 2, micro_batches=3, batch=6, async_reduce=False),
        "qwen3",
        tied=True,
    ),
]
INTERLEAVED_FOUR = [
    Named(
        "2 chunks, tp with Megatron-SP, uneven",
        interleaved(4, "1 2r 2 1 2r 1", (1, 2, 2, 1), 2, vocab="2", micro_batches=4),
        "qwen2",
    ),
    Named(
        "2 chunks, zero3 and zero2, tied",
        interleaved(4, "1z 2zr 1 2", (1,) * 4, 2, vocab="1z", micro_batches=3, batch=12, default=DataParallel.ZERO2),
        "llama",
        "adamw",
        tied=True,
    ),
    Named(
        "3 chunks, Ulysses, strided, plain tp",
        interleaved(4, "2u 2 1 1 2r 2", (1,) * 6, 3, vocab="2u", micro_batches=2, megatron_sp=False),
        "qwen2",
    ),
    Named(
        "2 chunks, zero3, reduced every micro-batch",
        interleaved(4, "1z 2zr 2 1z 1", (2, 1, 1, 1), 2, micro_batches=4, async_reduce=False),
        "qwen2",
    ),
    Named("4 stages of 2 chunks", interleaved(4, "1 1r 1 1 1 1r 1 1", (1,) * 8, 2, micro_batches=4), "llama"),
    Named(
        "4 stages of 2 chunks, 7 micro-batches, tied",
        interleaved(4, "1 1 1r 1 1 1 1 1 1r", (1, 1, 2, 1, 1, 1, 1, 1), 2, micro_batches=7, batch=7),
        "qwen2",
        tied=True,
    ),
    Named("4 stages of 2 chunks, 2 micro-batches", interleaved(4, "1 " * 8, (1,) * 8, 2, micro_batches=2), "llama"),
]
INTERLEAVED_EIGHT = [
    Named(
        "4 stages of 2 chunks, all mixed",
        interleaved(8, "2 1z 2u 2r 1 2zr 1 2", (1,) * 8, 2, vocab="2", micro_batches=6, batch=24, megatron_sp=False),
        "llama",
    ),
    Named(
        "2 stages of 3 chunks, tp 1-4, tied",
        interleaved(8, "1 4r 2 2s 4z 1", (1,) * 6, 3, vocab="4", micro_batches=3, batch=12, default=DataParallel.ZERO2),
        "qwen2",
        "adamw",
        tied=True,
    ),
]


# Layers that recompute some of their parts.
PARTS_TWO = [
    Named("parts, tp with Megatron-SP", plan(2, "2n 2a 2m 2nm", vocab="2"), "qwen2"),
    Named("parts, Ulysses and dp", plan(2, "2una 2um 1nam 1a", vocab="2u"), "llama"),
]
PARTS_FOUR = [
    Named("parts alone, one kv head", plan(4, "1n 1a 1m 1na 1nm 1am 1nam"), "llama", kv_heads=1),
    Named("parts, tp 2-4 with Megatron-SP, kv heads shared", plan(4, "2nam 4nm 4a 2n", vocab="4"), "qwen2", kv_heads=2),
    Named("parts, tp without Megatron-SP", plan(4, "2n 4m 2nm 1a", vocab="2", megatron_sp=False), "llama"),
    Named("parts, Ulysses, fewer kv heads than ranks", plan(4, "4ua 2unam 4um", vocab="2u"), "qwen2", kv_heads=2),
    Named("parts, zero3", plan(4, "1znm 2za 1znam 1zm", vocab="1z"), "qwen2"),
    Named("parts, zero2, AdamW", plan(4, "1n 2nam 1m", vocab="2", default=DataParallel.ZERO2), "llama", "adamw"),
    Named("parts in a pipeline", plan(4, "1n 2nm 2a 1m", (1, 3), vocab="2", micro_batches=4), "qwen2"),
    Named(
        "parts, GPipe, reduced every micro-batch",
        plan(4, "2nam 1zn 1m", (2, 1), micro_batches=4, schedule=Schedule.GPIPE, async_reduce=False),
        "llama",
    ),
    Named(
        "parts, 2 chunks, zero3, tied",
        interleaved(4, "1zn 2nm 1a 2znam 1r", (1, 2, 1, 1), 2, vocab="1z", micro_batches=4),
        "qwen2",
        tied=True,
    ),
    Named("parts, norms of q and k", plan(4, "2nam 1a 4nm", vocab="4"), "qwen3"),
]

# Layers with experts, of every family by turns.
EXPERTS_TWO = [
    Named("experts: unlike layers", having(plan(2, "1 1z 1r"), "2 1x2 2"), "qwen3_moe"),
    Named(
        "experts: ZeRO of either half",
        having(plan(2, "1z 1", default=DataParallel.ZERO2), "1 1z"),
        "qwen2_moe",
        vocabulary=2,
    ),
    Named("experts: reduced every micro-batch", having(plan(2, "1 2", async_reduce=False), "2 1"), "mixtral"),
    Named(
        "experts: GPipe", having(plan(2, "1 1r", (1, 1), micro_batches=4, schedule=Schedule.GPIPE), "1 1z"), "mixtral"
    ),
    Named("experts: bf16", in_16_bits(having(plan(2, "1r 2"), "2 1x2")), "qwen3_moe"),
    Named("experts: fp16", in_16_bits(having(plan(2, "1 2z"), "2z 2"), Precision.FP16), "mixtral"),
]
EXPERTS_FOUR = [
    Named("experts: ep 4, plain", having(plan(4, "1 1r", micro_batches=1), "4 4"), "qwen3_moe"),
    Named("experts: ep 2 with tp 2, and whole", having(plan(4, "1 1zh2"), "2x2 1zh2"), "qwen2_moe"),
    Named("experts: with Megatron-SP", having(plan(4, "2s 4r", vocab="2"), "4 2"), "mixtral", vocabulary=2),
    Named("experts: with plain tp", having(plan(4, "2 4r", megatron_sp=False), "4 2x2"), "qwen3_moe"),
    Named(
        "experts: GPipe, unlike stages",
        having(plan(4, "1 2r 1", (2, 1), micro_batches=4, schedule=Schedule.GPIPE), "2 1x2 2z"),
        "qwen3_moe",
    ),
    Named(
        "experts: bf16, ZeRO",
        in_16_bits(having(plan(4, "1 2zr 1", default=DataParallel.ZERO2), "4 2z 2x2")),
        "qwen2_moe",
    ),
]
EXPERTS_LATE = [
    Named(
        "experts: ep 2 over two, three ZeRO types",
        having(plan(4, "1 1 1z", default=DataParallel.ZERO2), "2 2z 2"),
        "qwen3_moe",
        vocabulary=2,
    ),
    Named("experts: with Ulysses and cp", having(plan(4, "2u 1c2 2c2"), "4 4 2x2"), "qwen2_moe", vocabulary=2),
    Named("experts: in stages", having(plan(4, "1r 2 1", (2, 1), micro_batches=4), "2 1x2 2z"), "mixtral"),
    Named(
        "experts: interleaved",
        having(plan(4, "1 1 2 1a", (1, 1, 1, 1), micro_batches=4, chunks=2), "2 2 1 2"),
        "qwen3_moe",
        vocabulary=2,
    ),
]
EXPERTS_SIX = [
    Named(
        "experts: ep 3 and 2 with tp 3, cp 3", having(plan(6, "1 1c3 3r", vocab="3", batch=12), "3 2x3 3z"), "mixtral"
    ),
]
EXPERTS_EIGHT = [
    Named(
        "experts: ep 4 in two stages of tp 2",
        having(plan(8, "2 2r 1 2c2", (2, 2), vocab="2", micro_batches=4, batch=16), "4 2x2 4z 1x4"),
        "qwen2_moe",
    ),
    Named(
        "experts: ep 4 over two, ZeRO, tied",
        having(plan(8, "1z 2uh4 8", vocab="1z", batch=16, default=DataParallel.ZERO2), "4z 2h2 8"),
        "qwen3_moe",
        tied=True,
    ),
]

# Dense layers among layers with experts.
GPIPE = {"schedule": Schedule.GPIPE, "micro_batches": 4}
KINDS_TWO = [
    Named("kinds: dense first", having(plan(2, "1 1z 1r"), "1 2 1x2"), "qwen2_moe", dense=(0,)),
    Named("kinds: every second", having(plan(2, "2 1 2r 1"), "1 2 1 1x2"), "qwen3_moe", dense=(0, 2)),
    Named("kinds: dense last, parts", having(plan(2, "1 1 2nam", vocab="2"), "2 1 1"), "qwen3_moe", dense=(2,)),
    Named(
        "kinds: a stage of dense layers",
        having(plan(2, "1 1 1r", (1, 2), micro_batches=4), "1 1 1"),
        "qwen2_moe",
        dense=(0,),
    ),
    Named("kinds: GPipe, dense behind", having(plan(2, "1 1", (1, 1), **GPIPE), "1 1"), "qwen3_moe", dense=(1,)),
    Named("kinds: bf16", in_16_bits(having(plan(2, "1r 2"), "1 1x2")), "qwen3_moe", dense=(0,)),
]
KINDS_FOUR = [
    Named("kinds: two first", having(plan(4, "4 4nm 1 2r", vocab="2"), "1 1 4 2x2"), "qwen3_moe", dense=(0, 1)),
    Named("kinds: Ulysses and cp", having(plan(4, "1z 2u 1c2 2", vocab="2"), "1z 4 2z 2x2"), "qwen2_moe", dense=(0,)),
    Named(
        "kinds: stages that begin dense",
        having(plan(4, "2 1 2 1r", (2, 2), vocab="2", micro_batches=4), "1 2 1 2"),
        "qwen3_moe",
        dense=(0, 2),
    ),
    Named("kinds: plain tp", having(plan(4, "4 2 4r", megatron_sp=False), "1 4 2x2"), "qwen2_moe", dense=(0,)),
    Named(
        "kinds: interleaved, ZeRO",
        having(plan(4, "1 1 2 1a", (1, 1, 1, 1), micro_batches=4, chunks=2, default=DataParallel.ZERO2), "1 2 1 2"),
        "qwen3_moe",
        dense=(0, 2),
    ),
    Named("kinds: dense within", having(plan(4, "1 2nam 1"), "4 1 2"), "qwen3_moe", dense=(1,)),
    Named(
        "kinds: stages of dense layers alone",
        having(plan(4, "1 1 1 1", (1, 1, 1, 1), micro_batches=4), "1 1 1 1"),
        "qwen2_moe",
        dense=(0, 3),
    ),
]
KINDS_SIX = [
    Named("kinds: ep 3, cp 3", having(plan(6, "3 1c3 3r", vocab="3", batch=12), "1 3x2 3z"), "qwen2_moe", dense=(0,)),
]
KINDS_EIGHT = [
    Named(
        "kinds: ep 4 in two stages of tp 2, tied",
        having(plan(8, "4 2r 2 2c2", (2, 2), vocab="2", micro_batches=4, batch=16), "1 2x2 1 1x4"),
        "qwen3_moe",
        dense=(0, 2),
        tied=True,
    ),
]

# GLM-4.5: rotary positions on half of each head, sigmoid routing without latents.
PARTIAL = [
    Named(
        "half-turned heads: tp, Ulysses, ep", having(plan(4, "2 4u 2r", vocab="2"), "1 4 2x2"), "glm4_moe", dense=(0,)
    ),
    Named(
        "half-turned heads: cp, two stages", having(plan(4, "1c2 1 2r", (1, 2), micro_batches=4), "1 2 1x2"), "glm4_moe"
    ),
]

# Latent attention, and DeepSeek's routing.
LATENT_TWO = [
    Named("latents: tp 2, ZeRO-3", having(plan(2, "1z 2r 2z 1"), "1 2 1x2 1", dense=(0,)), "deepseek_v3", dense=(0,)),
    Named("latents: plain tp 2", having(plan(2, "2 2r 1", vocab="2", megatron_sp=False), "1 2 1x2"), "deepseek_v2"),
    Named("latents: Ulysses, cp", having(plan(2, "2u 1c2 2uz"), "2 1 1x2"), "deepseek_v3"),
    Named("latents: parts recomputed", having(plan(2, "2nam 1nm 2n 2a"), "1 1 1 2"), "deepseek_v2", dense=(0, 1, 2)),
    Named(
        "latents: stages, ZeRO-2",
        having(plan(2, "1 1r 1a", (1, 2), micro_batches=4, default=DataParallel.ZERO2), "1 1 1"),
        "deepseek_v3",
        dense=(0,),
    ),
    Named("latents: bf16", in_16_bits(having(plan(2, "1r 2"), "1 1x2")), "deepseek_v3", dense=(0,)),
]
LATENT_FOUR = [
    Named("latents: tp 4 and 2, ep 4", having(plan(4, "4 2r 2a", vocab="2"), "1 4 2x2"), "deepseek_v3", dense=(0,)),
    Named(
        "latents: plain tp 4, cp",
        having(plan(4, "4 1c4 2c2r", megatron_sp=False), "1 4 2x2"),
        "deepseek_v2",
        dense=(0,),
    ),
    Named("latents: Ulysses with cp, ZeRO-3", having(plan(4, "2c2u 4uz 2z", vocab="2u"), "4 1x2z 4"), "deepseek_v3"),
    Named(
        "latents: ZeRO in parts with tp",
        having(plan(4, "1zh2 2z 1zh2"), "1 4 2x2", dense=(0,)),
        "deepseek_v3",
        dense=(0,),
    ),
    Named(
        "latents: interleaved",
        having(plan(4, "1 2 2a 1", (1, 1, 1, 1), micro_batches=4, chunks=2, default=DataParallel.ZERO2), "1 2 1x2 1"),
        "deepseek_v3",
        dense=(0,),
    ),
]
LATENT_SIX = [
    Named(
        "latents: tp 3, cp 3", having(plan(6, "3 1c3 3r", vocab="3", batch=12), "1 3x2 3z"), "deepseek_v3", dense=(0,)
    ),
]
LATENT_EIGHT = [
    Named(
        "latents: tp 4 in two stages, ep 4",
        having(plan(8, "4 2r 2 2c2", (2, 2), vocab="2", micro_batches=4, batch=16), "1 2x2 4 1x4"),
        "deepseek_v3",
        dense=(0,),
    ),
]
EVERY = [
    *PARTIAL,
    *(TWO + INTERLEAVED_TWO + PARTS_TWO + EXPERTS_TWO + KINDS_TWO + LATENT_TWO),
    *(FOUR + ZERO + HYBRID_FOUR + INTERLEAVED_FOUR + PARTS_FOUR + CONTEXT_FOUR),
    *(EXPERTS_FOUR + EXPERTS_LATE + KINDS_FOUR + LATENT_FOUR),
    *(SIX + EXPERTS_SIX + KINDS_SIX + LATENT_SIX),
    *(EIGHT + HYBRID_EIGHT + INTERLEAVED_EIGHT + CONTEXT_EIGHT + EXPERTS_EIGHT + KINDS_EIGHT + LATENT_EIGHT),
]
