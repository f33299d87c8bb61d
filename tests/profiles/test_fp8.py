"""Matrix products in FP8, which are planned only: memory, messages and times by hand, and commands that refuse them."""

import json
from dataclasses import replace

import pytest

from paddlenlp_galvatron.base.units import MIB
from paddlenlp_galvatron.cost_model.traffic import step_traffic_bytes
from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, Precision
from paddlenlp_galvatron.profiles import Variant
from paddlenlp_galvatron.profiles.analytic import Speed, analytic_computation, analytic_memory
from paddlenlp_galvatron.profiles.computation import PassKey, layer_part
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

SEQ, H100 = 4096, load_data_sheet("h100")
MODEL = load_model("llama3-8b")  # 4,096 wide, 32 heads and 8 kv heads of 128, an MLP of 14,336
# Both norms' outputs and the MLP's product have one byte; attention keeps its result and its copy of one byte.
SPARED_BYTES = 2 * 4096 + 14336 - 4096
# Inputs of products, and the gradients of their outputs.
READ, WRITTEN = 2 * 4096 + 4096 + 14336, 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096


@pytest.mark.parametrize("tp", [1, 4])
def test_a_layer_keeps_one_byte_of_each_number_that_products_read(tp):
    how, at = (MODEL, Precision.BF16, [SEQ]), Variant(0, True)
    plain, fp8 = (analytic_memory(*how, products=each).layers[at][SEQ].activation_mib[tp] for each in (None, "fp8"))
    assert plain - fp8 == pytest.approx(SPARED_BYTES * SEQ / tp / MIB)


def test_a_layers_products_take_half_as_long_and_numbers_are_quantised():
    how, key = (MODEL, H100, Precision.BF16, [SEQ]), PassKey(layer_part(0), 1, SEQ, 1)
    before, after = (analytic_computation(*how, products=each).passes[key] for each in (None, "fp8"))
    plain, speed = (Speed.of(H100, Precision.BF16, each) for each in (None, "fp8"))
    weights = 2 * SEQ * MODEL.layer_parameters * (1 / plain.flops - 1 / speed.layer_flops)
    quantised = SEQ * 4 / plain.bytes  # two bytes read, and two copies of one byte written
    assert before.forward_ms - after.forward_ms == pytest.approx(weights - READ * quantised)
    assert before.backward_ms - after.backward_ms == pytest.approx(2 * weights - WRITTEN * quantised)


@pytest.mark.parametrize(
    "degrees", [pytest.param({"global_tp_deg": 2}, id="tokens"), pytest.param({"sdp": 1}, id="weights")]
)
def test_gathers_of_layers_send_one_byte(degrees):
    assumed = Assumptions(True, Precision.BF16, seq_length=SEQ)
    sizes = {"layers": 32, "world_size": 2, "global_train_batch_size": 2, "vocab_tp": 1, "embed_sdp": False}
    plan = uniform_plan(**sizes, assumed=assumed, default_dp_type="ddp", **degrees)
    plain = step_traffic_bytes(plan, MODEL)
    fp8 = step_traffic_bytes(replace(plan, assumed=replace(assumed, products="fp8")), MODEL)
    assert fp8 == plain | {"all_gather": plain["all_gather"] // 2}


def test_its_plan_is_explained_and_not_carried_out(galvatron, tmp_path):
    """Neighbours of a search: other devices, measured profiles, and each command that carries a plan out."""
    plan = tmp_path / "plan.json"
    searched = galvatron("search", "llama3.2-1b", "--device=h100", "--products=fp8", f"--output={plan}", "--seq=4096")
    assert searched.code == 0 and "products of layers fp8" in searched.out
    assert json.loads(plan.read_text())["galvatron"]["assumed"]["products"] == "fp8"
    for command in ("explain", "plan show"):
        assert "products of layers fp8" in galvatron(*command.split(), plan).out
    assert "planned only" in galvatron("plan", "show", plan).out
    for refused in ("train {} --model llama3.2-1b --input_dir random", "parity {}", "plan check {}"):
        ran = galvatron(*refused.format(plan).split())
        assert ran.code == 2 and "fp8 is planned only" in ran.err
    for words in ("fit llama3.2-1b --device=a100", "explain {} --device=a100", f"explain {{}} --profiles={tmp_path}"):
        ran = galvatron(*words.format(plan).split(), "--products=fp8")
        assert ran.code == 2 and ran.err.startswith("error: products: ")
