"""Published plans of models with experts load from their numbers, and are priced or refused with the reason."""

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import derive
from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.options.aliases import canonical_name
from paddlenlp_galvatron.options.uniform import DegreeOptions, UniformOptions
from paddlenlp_galvatron.plan import Assumptions, Plan, Precision
from paddlenlp_galvatron.plan.check import require_valid
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

MIXTRAL, MIXTRAL_22B, QWEN, QWEN_235B = "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b"
# Model, GPUs, tp, pp, chunks of a stage, ep, cp, samples of a micro-batch, batch, length, ZeRO; the refusal.
ZOO = [
    # Megatron-MoE-ModelZoo, runtime.conf of three versions
    (MIXTRAL, 64, 1, 4, 8, 8, 1, 1, 256, 4096, 1, ""),
    (MIXTRAL_22B, 128, 2, 8, 1, 8, 1, 1, 256, 4096, 1, ""),
    (MIXTRAL_22B, 128, 2, 8, 7, 8, 1, 1, 256, 4096, 1, ""),
    (QWEN_235B, 256, 2, 8, 4, 32, 1, 1, 256, 4096, 1, ""),
    (QWEN, 32, 1, 1, 1, 8, 1, 1, 256, 4096, 1, ""),
    # its readme of Qwen3, and the long contexts there
    (QWEN_235B, 256, 2, 8, 4, 32, 1, 1, 2048, 4096, 1, ""),
    (QWEN_235B, 256, 2, 32, 3, 8, 1, 1, 2048, 4096, 1, "virtual_pp_deg: 96 chunks of stages"),
    (QWEN_235B, 256, 4, 8, 4, 8, 1, 1, 2048, 4096, 1, ""),
    (QWEN_235B, 256, 2, 1, 1, 8, 1, 4, 2048, 4096, 3, ""),
    (QWEN_235B, 256, 4, 8, 4, 8, 1, 1, 256, 16384, 1, ""),
    (QWEN_235B, 256, 4, 8, 4, 8, 2, 1, 256, 32768, 1, ""),
    (QWEN_235B, 256, 4, 8, 4, 8, 4, 1, 256, 65536, 1, "beyond the 40960 positions"),
    (QWEN_235B, 256, 4, 8, 4, 8, 8, 1, 256, 131072, 1, "beyond the 40960 positions"),
    # Megatron-Bridge; LAER-MoE's comparison by Megatron, and its own runs; PaddleFleet's example
    (QWEN, 16, 1, 1, 1, 16, 1, 1, 1024, 4096, 1, ""),
    (MIXTRAL, 32, 8, 1, 1, 8, 1, 1, 128, 8192, 1, ""),
    (MIXTRAL_22B, 32, 8, 1, 1, 8, 1, 1, 128, 8192, 1, ""),
    (MIXTRAL, 32, 1, 1, 1, 32, 1, 1, 128, 8192, 3, "degree 32 of layers 0-31 does not divide the 8 experts"),
    (QWEN, 16, 2, 2, 1, 4, 1, 1, 128, 8192, 1, ""),
]
NAMES = {  # of tp, pp, chunks, ep, cp, samples, micro-batches
    "Galvatron": ("global_tp_deg", "pp_deg", "virtual_pp_deg", "global_ep_deg", "global_cp_deg"),
    "PaddleNLP": (
        *("tensor_parallel_degree", "pipeline_parallel_degree", "virtual_pp_degree", "expert_parallel_degree"),
        "context_parallel_degree",
    ),
    "PaddleFleet": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("expert_model_parallel_size", "context_parallel_size"),
    ),
}


def loaded(row: tuple, names: tuple[str, ...]) -> Plan:
    model, gpus, *degrees, samples, batch, length, zero, _ = row
    dp = gpus // degrees[0] // degrees[1] // degrees[4]
    stated = dict(zip(map(canonical_name, names), degrees, strict=True))
    stated |= {"per_device_train_batch_size": samples, "gradient_accumulation_steps": batch // dp // samples}
    stated |= {"sharding": f"stage{zero}", "vocab_tp": degrees[0]}
    assumed = Assumptions(True, Precision.BF16, seq_length=length)
    shape = load_model(model)
    of_paddlenlp = DegreeOptions.from_values(stated)
    plan = of_paddlenlp.onto(UniformOptions.from_values(stated), gpus).plan(
        shape.layers, gpus, assumed, shape.dense_layers
    )
    require_valid(plan, load_model(model))
    return plan


@pytest.mark.parametrize("row", ZOO, ids=lambda row: "-".join(map(str, row[:9])))
def test_published_plans_load_and_are_priced_or_refused(row):
    *_, refused = row
    plans = []
    for names in NAMES.values():
        if refused:
            with pytest.raises(UserError, match=refused):
                loaded(row, names)
        else:
            plans.append(loaded(row, names))
    if refused:
        return
    assert plans[0] == plans[1] == plans[2]
    plan, model = plans[0], load_model(row[0])
    assert (plan.global_batch, plan.layers[0].ep, plan.chunks) == (row[8], row[5], row[4])
    prediction = derive(model, load_data_sheet("h100"), row[1] // 8, 8, plan.assumed).predict(plan)
    assert 0 < prediction.time_s < 600 and all(stage.memory.total_mib > 0 for stage in prediction.stages)
