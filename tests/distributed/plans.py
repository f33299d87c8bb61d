"""Layer-wise plans for the parity tests, as lists of named cases."""

from paddlenlp_galvatron.plan import DataParallel, Precision, Schedule

from .plan_words import SEED, WORDS, Named, having, in_16_bits, named, plan

__all__ = ["SEED", "WORDS", "Named", "having", "in_16_bits", "named", "plan"]

ZERO2, GPIPE = DataParallel.ZERO2, Schedule.GPIPE
BF16, FP16 = Precision.BF16, Precision.FP16

TWO = [
    named("tp 1-2 without Megatron-SP", "llama, adamw", 2, "[2] 1 2r 2 1", megatron_sp=False),
    named("two stages, 1F1B, more micro-batches than stages", "qwen2", 2, "1 | 1r 1", batch="8/4"),
    named("Ulysses with dp, vocabulary by sequence", "llama", 2, "[2u] 2u 1 2ur"),
]
FOUR = [
    named("GPipe, plain tp", "llama, adamw", 4, "1 2r 2 | 1 2", batch="8/4", megatron_sp=False, schedule=GPIPE),
    named("four stages, fewer micro-batches than stages", "llama", 4, "1 | 1r 1 | 1 | 1", batch="4/2"),
    named("strided tp without Megatron-SP", "qwen2, adamw", 4, "[2] 2s 2 2sr 4", megatron_sp=False),
    named("Ulysses, tp and dp mixed", "qwen2", 4, "[4] 2u 2 4ur 1", megatron_sp=False),
]
ZERO = [
    named("zero2 of one micro-batch", "llama", 4, "[2] 1 1r 2", batch="8/1", default=ZERO2),
    named("zero3 over Ulysses", "qwen2", 4, "[2uz] 2uz 4uz 1z 2", megatron_sp=False),
    named("zero3 in a pipeline", "llama, adamw", 4, "[1z] 1z 1zr | 2 1z", batch="8/4"),
    named("reduced every micro-batch: ddp, zero3", "qwen2", 4, "[2] 1 1z | 2 2zr", batch="8/4", async_reduce=False),
    named("tied and zero3, one stage", "ernie4_5, adamw, tied", 4, "[2z] 1z 2"),
    named("tied across stages", "qwen2, tied", 4, "[2] 1 | 2", batch="8/4"),
    named("tied across stages, zero2", "llama, tied", 4, "1 | 2", default=ZERO2),
    named("two kv heads on four ranks, no Megatron-SP, zero3", "llama", 4, "4 2z 1", megatron_sp=False, kv_heads=2),
    named("fewer kv heads than Ulysses", "qwen2", 4, "4u 2uz 4ur", kv_heads=2),
]
CONTEXT_FOUR = [
    named("cp with tp with Megatron-SP, norms of heads", "qwen3", 4, "[2c2] 2c2 2c2r 4 1c4"),
    named("cp with tp without Megatron-SP", "llama", 4, "[2] 2c2 2c2r 1c2 2", megatron_sp=False),
    named("cp with Ulysses", "ernie4_5", 4, "[2c2u] 2c2u 4u 2c2ur 1c2"),
    named("fewer kv heads than ranks that split them", "llama", 4, "2c2 2c2u 1c4", kv_heads=1),
    named("strided cp, with tp and alone", "qwen2", 4, "[2] 2c2s 1c2s 1c2 2s"),
    named("cp under zero2 and zero3", "qwen2", 4, "[1c2z] 1c2 1c4z 2c2zr 1z", default=ZERO2),
    named("cp under zero3, reduced every micro-batch", "ernie4_5", 4, "1c2z 1c4 2c2z", async_reduce=False),
    named("cp in a pipeline, tied", "ernie4_5, tied", 4, "1c2 2r | 1c2r 1", batch="8/4"),
    named("cp in an interleaved pipeline", "llama", 4, "[1c2] 1c2 | 1c2r || 2 | 1c2z", batch="6/3"),
    named("cp with parts recomputed", "qwen2", 4, "[2c2] 1c2a 2c2nm 1c4na 2c2ma", kv_heads=4),
    named(
        "cp, parts, chunks", "qwen3", 4, "[1c2] 1c2a | 2nm || 1c2zm | 1nam || 2r | 1c2na", batch="8/4", default=ZERO2
    ),
]
CONTEXT_EIGHT = [
    named("cp 2, 4, 8 with tp", "qwen2", 8, "[2c4] 2c4 4c2r 1c8 2c2z 8"),
    named("cp with tp and Ulysses, two stages", "qwen3", 8, "[4] 2c2 2c2ur | 1c4 4"),
    named("parts, tp 2-8, Ulysses", "llama", 8, "[8] 2nam 8nm 4ua 1m", batch="16/2"),
    named("cp, parts, 2 chunks, zero3", "qwen2", 8, "[2c2] 1c4a | 2c2nm 4ma || 2c2zr | 1znam 2c2u", batch="12/3"),
    named(
        "cp, parts",
        "llama, adamw",
        8,
        "[1c2] 1c2n | 2a | 1c2m | 2nam || 1c2r | 2nm | 1c2 | 1a",
        batch="12/6",
        megatron_sp=False,
    ),
    named("strided, without Megatron-SP", "llama", 8, "[8] 2c2s 4c2 1c2s 2c4r", megatron_sp=False),
]
# ZeRO in a part of the ranks that hold the same weights.
HYBRID_FOUR = [
    named("zero2 and zero3 in parts", "qwen2", 4, "[1zh2] 1zh2 1h2 1z 1zrh2", default=ZERO2),
    named("in parts, AdamW, tied", "llama, adamw, tied", 4, "[1h2] 1zh2 1h2 2r", default=ZERO2),
    named("in parts, tied", "qwen2, tied", 4, "[1zh2] 1zh2 1h2 1", batch="12/3", default=ZERO2, async_reduce=False),
    named("in parts over Ulysses and cp", "qwen2", 4, "[2uzh2] 2uzh2 4uh2 1c2h2 2c2u", default=ZERO2, kv_heads=2),
]
HYBRID_EIGHT = [
    named("in parts of 2 and 4 with tp", "qwen2", 8, "[2zh2] 2zh2 1h4 1zh2 2sh2 2rzh2", batch="16/2", default=ZERO2),
    named("in parts, uneven stages", "llama, adamw, tied", 8, "[1h2] 1zh2 | 1h2 2 1zrh2", batch="16/4", default=ZERO2),
    named(
        "in parts: chunks", "qwen2", 8, "[1zh2] 1zh2 | 2 || 1h2 | 1zh2", batch="12/3", default=ZERO2, async_reduce=False
    ),
]
SIX = [
    named("in parts of 2 and 3", "qwen2, adamw", 6, "[1h2] 1zh2 1h3 1c3zh3 1c3h2 2h3", batch="12/2", default=ZERO2),
    named("cp 3 and 6", "llama", 6, "[3] 1c3 2c3r 1c6 3c2u", batch="12/2"),
    named("parts, 3-way and 6-way tp", "qwen2", 6, "[3] 3nam 6nm 2ua 1m", batch="12/2"),
    named("cp 3, parts, 2 chunks", "llama", 6, "[1c3] 1c3na | 3m || 1c3zr | 3nam", batch="9/3"),
    named("cp, parts, three stages", "qwen2, tied", 6, "[2] 1c2a | 2nm | 1m || 2nam 1c2n | 2r | 1c2ma", batch="8/4"),
    named("three stages, 2-way Ulysses", "qwen2", 6, "[2] 2u | 1 | 2r 2", batch="12/3"),
]
EIGHT = [
    named("two stages of four, all mixed", "qwen2", 8, "[2] 1 2r 4 | 2u 4sr 1", batch="16/4", megatron_sp=False),
    named("four stages of two", "qwen2, adamw", 8, "[2] 2 | 1 | 2r | 1 1", batch="16/4"),
]


# Rounds of micro-batches that are full, longer, and shorter than there are stages.
INTERLEAVED_TWO = [
    named("2 chunks", "qwen2", 2, "1 | 1r 1 || 1 | 1", batch="8/4"),
    named("2 chunks, tied, reduced every time", "qwen3, tied", 2, "1 | 1 || 1 | 1r", batch="6/3", async_reduce=False),
]
INTERLEAVED_FOUR = [
    named("2 chunks, zero3 and zero2", "llama, adamw, tied", 4, "[1z] 1z | 2zr || 1 | 2", batch="12/3", default=ZERO2),
    named("3 chunks, Ulysses, strided, plain tp", "qwen2", 4, "[2u] 2u | 2 || 1 | 1 || 2r | 2", megatron_sp=False),
    named("4 stages of 2 chunks", "llama", 4, "1 | 1r | 1 | 1 || 1 | 1r | 1 | 1", batch="8/4"),
    named("4 stages of 2 chunks, tied", "qwen2, tied", 4, "1 | 1 | 1r 1 | 1 || 1 | 1 | 1 | 1r", batch="7/7"),
    named("4 stages of 2 chunks, 2 micro-batches", "llama", 4, "1 | 1 | 1 | 1 || 1 | 1 | 1 | 1"),
]
INTERLEAVED_EIGHT = [
    named("chunks, all mixed", "llama", 8, "[2] 2 | 1z | 2u | 2r || 1 | 2zr | 1 | 2", batch="24/6", megatron_sp=False),
    named("3 chunks, tp 1-4", "qwen2, adamw, tied", 8, "[4] 1 | 4r || 2 | 2s || 4z | 1", batch="12/3", default=ZERO2),
]


# Layers that recompute some of their parts.
PARTS_TWO = [
    named("parts, tp with Megatron-SP", "qwen2", 2, "[2] 2n 2a 2m 2nm"),
    named("parts, Ulysses and dp", "llama", 2, "[2u] 2una 2um 1nam 1a"),
]
PARTS_FOUR = [
    named("parts, Ulysses, fewer kv heads than ranks", "qwen2", 4, "[2u] 4ua 2unam 4um", kv_heads=2),
    named("parts in a pipeline", "qwen2", 4, "[2] 1n | 2nm 2a 1m", batch="8/4"),
    named("parts, GPipe", "llama", 4, "2nam 1zn | 1m", batch="8/4", schedule=GPIPE, async_reduce=False),
    named("parts, 2 chunks, zero3, tied", "qwen2, tied", 4, "[1z] 1zn | 2nm 1a || 2znam | 1r", batch="8/4"),
]

# Layers with experts, of every family by turns.
EXPERTS_TWO = [
    named("experts: unlike layers", "qwen3_moe", 2, "1 1z 1r", "2 1x2 2"),
    named("experts: ZeRO of either half", "qwen2_moe", 2, "1z 1", "1 1z", default=ZERO2, vocabulary=2),
    named("experts: reduced every micro-batch", "mixtral", 2, "1 2", "2 1", async_reduce=False),
    named("experts: GPipe", "mixtral", 2, "1 | 1r", "1 1z", batch="8/4", schedule=GPIPE),
    named("experts: bf16", "qwen3_moe", 2, "1r 2", "2 1x2", precision=BF16),
    named("experts: fp16", "mixtral", 2, "1 2z", "2z 2", precision=FP16),
]
EXPERTS_FOUR = [
    named("experts: ep 4, plain", "qwen3_moe", 4, "1 1r", "4 4", batch="8/1"),
    named("experts: ep 2 with tp 2, and whole", "qwen2_moe", 4, "1 1zh2", "2x2 1zh2"),
    named("experts: with Megatron-SP", "mixtral", 4, "[2] 2s 4r", "4 2", vocabulary=2),
    named("experts: with plain tp", "qwen3_moe", 4, "2 4r", "4 2x2", megatron_sp=False),
    named("experts: GPipe, unlike stages", "qwen3_moe", 4, "1 2r | 1", "2 1x2 2z", batch="8/4", schedule=GPIPE),
    named("experts: bf16, ZeRO", "qwen2_moe", 4, "1 2zr 1", "4 2z 2x2", default=ZERO2, precision=BF16),
]
EXPERTS_LATE = [
    named("experts: ep 2 over two, three ZeRO types", "qwen3_moe", 4, "1 1 1z", "2 2z 2", default=ZERO2, vocabulary=2),
    named("experts: with Ulysses and cp", "qwen2_moe", 4, "2u 1c2 2c2", "4 4 2x2", vocabulary=2),
    named("experts: in stages", "mixtral", 4, "1r 2 | 1", "2 1x2 2z", batch="8/4"),
    named("experts: interleaved", "qwen3_moe", 4, "1 | 1 || 2 | 1a", "2 2 1 2", batch="8/4", vocabulary=2),
]
EXPERTS_SIX = [named("experts: ep 3 and 2 with tp 3, cp 3", "mixtral", 6, "[3] 1 1c3 3r", "3 2x3 3z", batch="12/2")]
EXPERTS_EIGHT = [
    named("experts: ep 4 in two stages of tp 2", "qwen2_moe", 8, "[2] 2 2r | 1 2c2", "4 2x2 4z 1x4", batch="16/4"),
    named("experts: ZeRO, tied", "qwen3_moe, tied", 8, "[1z] 1z 2uh4 8", "4z 2h2 8", batch="16/2", default=ZERO2),
]

# Dense layers among layers with experts.
KINDS_TWO = [
    named("kinds: dense first", "qwen2_moe", 2, "1 1z 1r", "1 2 1x2", dense=(0,)),
    named("kinds: every second", "qwen3_moe", 2, "2 1 2r 1", "1 2 1 1x2", dense=(0, 2)),
    named("kinds: dense last, parts", "qwen3_moe", 2, "[2] 1 1 2nam", "2 1 1", dense=(2,)),
    named("kinds: a stage of dense layers", "qwen2_moe", 2, "1 | 1 1r", "1 1 1", batch="8/4", dense=(0,)),
    named("kinds: GPipe, dense behind", "qwen3_moe", 2, "1 | 1", "1 1", batch="8/4", schedule=GPIPE, dense=(1,)),
    named("kinds: bf16", "qwen3_moe", 2, "1r 2", "1 1x2", precision=BF16, dense=(0,)),
]
KINDS_FOUR = [
    named("kinds: two first", "qwen3_moe", 4, "[2] 4 4nm 1 2r", "1 1 4 2x2", dense=(0, 1)),
    named("kinds: Ulysses and cp", "qwen2_moe", 4, "[2] 1z 2u 1c2 2", "1z 4 2z 2x2", dense=(0,)),
    named("kinds: plain tp", "qwen2_moe", 4, "4 2 4r", "1 4 2x2", megatron_sp=False, dense=(0,)),
    named("kinds: 2 chunks", "qwen3_moe", 4, "1 | 1 || 2 | 1a", "1 2 1 2", batch="8/4", default=ZERO2, dense=(0, 2)),
    named("kinds: stages of dense layers alone", "qwen2_moe", 4, "1 | 1 | 1 | 1", "1 1 1 1", batch="8/4", dense=(0, 3)),
]
KINDS_SIX = [named("kinds: ep 3, cp 3", "qwen2_moe", 6, "[3] 3 1c3 3r", "1 3x2 3z", batch="12/2", dense=(0,))]
KINDS_EIGHT = [
    named("kinds: stages, tied", "qwen3_moe, tied", 8, "[2] 4 2r | 2 2c2", "1 2x2 1 1x4", batch="16/4", dense=(0, 2))
]

# GLM-4.5: rotary positions on half of each head, sigmoid routing without latents.
PARTIAL = [
    named("half-turned heads: tp, Ulysses, ep", "glm4_moe", 4, "[2] 2 4u 2r", "1 4 2x2", dense=(0,)),
    named("half-turned heads: cp, two stages", "glm4_moe", 4, "1c2 | 1 2r", "1 2 1x2", batch="8/4"),
]

# ERNIE-4.5: rotary positions on neighbouring pairs, softmax scores with a bias of the choice.
TWICE = {"micro_batches": 4, "vocab": "2"}
ERNIE = [
    Named("ERNIE: ep 2, ZeRO-3", having(plan(2, "1z 2r 1a 2"), "1 2 2 1x2", (0,)), "ernie4_5_moe", dense=(0,)),
    Named("ERNIE: all axes", having(plan(4, "4 2u 1c2 2r", vocab="2"), "1 4 2x2 4"), "ernie4_5_moe", dense=(0,)),
    Named(
        "ERNIE: ep in two stages, tied",
        having(plan(4, "2 1 1zr 1", (2, 2), **TWICE), "1 2 1 1x2", (2,)),
        *("ernie4_5_moe", "adamw"),
        dense=(0, 2),
        tied=True,
    ),
    Named(
        "ERNIE: tp 4, ep 4, two stages",
        having(plan(8, "4 2r 2 2c2", (2, 2), **TWICE, batch=16), "1 2x2 4 1x4"),
        "ernie4_5_moe",
        dense=(0,),
    ),
]

# Latent attention, and DeepSeek's routing.
LATENT_TWO = [
    Named("latents: tp 2, ZeRO-3", having(plan(2, "1z 2r 2z 1"), "1 2 1x2 1", dense=(0,)), "deepseek_v3", dense=(0,)),
    named("latents: plain tp 2", "deepseek_v2", 2, "[2] 2 2r 1", "1 2 1x2", megatron_sp=False),
    named("latents: Ulysses, cp", "deepseek_v3", 2, "2u 1c2 2uz", "2 1 1x2"),
    named("latents: parts recomputed", "deepseek_v2", 2, "2nam 1nm 2n 2a", "1 1 1 2", dense=(0, 1, 2)),
    named("latents: stages, ZeRO-2", "deepseek_v3", 2, "1 | 1r 1a", "1 1 1", batch="8/4", default=ZERO2, dense=(0,)),
    named("latents: bf16", "deepseek_v3", 2, "1r 2", "1 1x2", precision=BF16, dense=(0,)),
]
LATENT_FOUR = [
    named("latents: tp 4 and 2, ep 4", "deepseek_v3", 4, "[2] 4 2r 2a", "1 4 2x2", dense=(0,)),
    named("latents: plain tp 4, cp", "deepseek_v2", 4, "4 1c4 2c2r", "1 4 2x2", megatron_sp=False, dense=(0,)),
    named("latents: Ulysses with cp, ZeRO-3", "deepseek_v3", 4, "[2u] 2c2u 4uz 2z", "4 1x2z 4"),
    Named(
        "latents: ZeRO in parts with tp",
        having(plan(4, "1zh2 2z 1zh2"), "1 4 2x2", dense=(0,)),
        "deepseek_v3",
        dense=(0,),
    ),
]
LATENT_SIX = [named("latents: tp 3, cp 3", "deepseek_v3", 6, "[3] 3 1c3 3r", "1 3x2 3z", batch="12/2", dense=(0,))]
LATENT_EIGHT = [
    named("latents: two stages", "deepseek_v3", 8, "[2] 4 2r | 2 2c2", "1 2x2 4 1x4", batch="16/4", dense=(0,))
]

# Multi-token prediction: the last layer, behind the last norm; its embedding and LM head are the model's.
V3, GLM = "deepseek_v3, mtp", "glm4_moe, mtp"
MTP_TWO = [
    named("MTP: tp with Megatron-SP, layouts apart", V3, 2, "[2] 1 2r 1", "1 2 1x2", dense=(0,)),
    named("MTP: plain tp, recompute, ZeRO-3", GLM, 2, "[1z] 1 2 2rz", "1 2 2z", megatron_sp=False),
    named("MTP: alone in the last stage", f"{GLM}, adamw", 2, "1 | 1", "1 1", batch="8/4", default=DataParallel.ZERO2),
]
MTP_FOUR = [
    named("MTP: two stages, ep", V3, 4, "[2] 1 | 2 2r", "1 2 1x2", batch="8/4", dense=(0,)),
    named("MTP: cp and Ulysses", GLM, 4, "[1c2] 2u 4 1c2a", "1 4 2"),
    named("MTP: tied, reduced each", f"{GLM}, tied", 4, "[2z] 1 | 2z", "1 2z", batch="8/4", async_reduce=False),
    named("MTP: interleaved, ZeRO-3", V3, 4, "[1z] 1 | 2 || 2a | 1z", "1 2 1x2 2z", batch="8/4", dense=(0,)),
]
MTP_EIGHT = [
    named("MTP: tp 4 and cp in two stages", GLM, 8, "[4] 4 2r | 2 2c2", "1 2x2 4 1x4", batch="16/4", dense=(0,))
]
EVERY = [
    *(PARTIAL + ERNIE + MTP_TWO + MTP_FOUR + MTP_EIGHT),
    *(TWO + INTERLEAVED_TWO + PARTS_TWO + EXPERTS_TWO + KINDS_TWO + LATENT_TWO),
    *(FOUR + ZERO + HYBRID_FOUR + INTERLEAVED_FOUR + PARTS_FOUR + CONTEXT_FOUR),
    *(EXPERTS_FOUR + EXPERTS_LATE + KINDS_FOUR + LATENT_FOUR),
    *(SIX + EXPERTS_SIX + KINDS_SIX + LATENT_SIX),
    *(EIGHT + HYBRID_EIGHT + INTERLEAVED_EIGHT + CONTEXT_EIGHT + EXPERTS_EIGHT + KINDS_EIGHT + LATENT_EIGHT),
]
