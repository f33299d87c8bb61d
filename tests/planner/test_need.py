"""The reported sufficient memory is enough, and less is not; it is the same in every answer."""

import random
from typing import Any

import pytest

from paddlenlp_galvatron.base.errors import Infeasible
from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.planner import SearchResult
from paddlenlp_galvatron.planner.origin import OriginOptions
from paddlenlp_galvatron.planner.question import Question
from paddlenlp_galvatron.planner.scale import scaled

SIZES_GB = {"h100-80gb": 79.1, "a100-80gb": 79.3}
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "llama3-8b", "llama2-13b", "llama2-70b", "qwen3-30b-a3b")


def question(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    model = draw.choice(MODELS)
    asked = {
        "model_size": model, "device": draw.choice(sorted(SIZES_GB)), "world_size": draw.choice((1, 2, 4, 8, 16, 32)),
        "settle_bsz": draw.choice((8, 16, 61, 64, 256)), "seq_length": draw.choice((512, 2048, 4096)),
        "task": draw.choice(("pretrain", "sft") if "a3b" in model else ("pretrain", "lora", "sft")),
        "max_tp_deg": draw.choice((1, 2, 8)), "max_cp_deg": draw.choice((1, 1, 4)),
        "max_virtual_pp_deg": draw.choice((1, 1, 2)), "sp_space": draw.choice(("tp", "tp+sp")),
        "disable_ckpt": draw.random() < 0.3, "recompute_parts": draw.random() < 0.3,
        "offload_optimizer": draw.random() < 0.1, "memory_constraint": draw.choice((0.1, 0.5, 1, 2, 6, 12, 24)),
    }  # fmt: skip
    asked |= {"context_mib": draw.choice((0, 3000))} if draw.random() < 0.2 else {}
    if "a3b" not in model and draw.random() < 0.2:
        asked |= {"trainer": draw.choice(("paddlenlp", "paddlefleet", "paddleformers")), "max_virtual_pp_deg": 1}
        asked |= {"max_cp_deg": 1, "recompute_parts": False, "offload_optimizer": False, "settle_bsz": 8}
        asked["world_size"] = min(asked["world_size"], 4)  # every plan of these spaces is priced in Python
    return asked


def found(values: dict[str, Any], gb: float) -> SearchResult:
    return Question.of({**values, "memory_constraint": gb}).search()


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 250), marks=pytest.mark.slow)], ids=["10", "many"])
def test_what_is_reported_to_be_enough_is_and_one_per_cent_less_is_not(seeds):
    tried = 0
    for seed in seeds:
        values = question(seed)
        need = found(values, values["memory_constraint"]).need
        if need is None or (enough := float(need.enough_gib)) > SIZES_GB[values["device"]]:
            continue  # it fits at once, no strategy divides, or no such device has that much
        tried += 1
        less, best = found(values, 0.99 * enough), found(values, enough).best
        assert best and not less.best, (seed, enough)
        assert max(stage.memory.total_mib for stage in best.prediction.stages) <= 1024 * enough, seed
        assert less.need and float(less.need.enough_gib) == pytest.approx(enough, abs=0.011)
    assert tried > len(seeds) / 2


def test_fit_says_the_same_in_its_row_and_its_error(galvatron):
    ran = galvatron("fit", "llama2-70b", "--device", "a100-80gb", "--gpus", 8)
    assert ran.code == 3
    enough = ran.err.partition(" plan needs ")[2].split()[0]
    (row,) = [line for line in ran.out.splitlines() if "does not fit" in line]
    assert float(row.split()[5]) == pytest.approx(float(enough), abs=0.06)


def test_scale_says_what_would_be_enough(tmp_path):
    values = {"model_size": "qwen2.5-7b", "device": "h100-80gb", "world_size": 8, "settle_bsz": 64, "seq_length": 2048}
    plan, path = found(values | {"disable_tp": True, "disable_vtp": True}, 36).plan, tmp_path / "plan.json"
    write_plan(plan, path)

    def on_half(gb: float) -> None:
        scaled(plan, OriginOptions(plan=path, memory_constraint=gb), 4)

    with pytest.raises(Infeasible, match=r"need .* GiB each, of 36") as error:
        on_half(36)
    enough = float(str(error.value).partition(" need ")[2].split()[0])
    on_half(enough)
    with pytest.raises(Infeasible, match=rf"need {enough:.2f} GiB each"):
        on_half(0.99 * enough)
