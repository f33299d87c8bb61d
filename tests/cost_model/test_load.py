"""From files to predictions: folders, options, foreign profiles, published profiles of both dialects."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cost_examples import COMPUTATION, HARDWARE, MEMORY, MODEL, SEQ, example, example_plan

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import StageSetting, load
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, ModelShape, Precision, read_plan
from paddlenlp_galvatron.profiles import Fingerprint, Meta
from paddlenlp_galvatron.profiles.files import allreduce_name, computation_name, memory_name

DATA = Path(__file__).parents[3] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.exists(), reason="no published profile files next to the checkout")
LLAMA2_7B = ModelShape("llama2-7b", "llama", 32, 4096, 11008, 32, 32, 32000, 4096)


@pytest.fixture
def folder(tmp_path):
    HARDWARE.save(tmp_path)
    COMPUTATION.save(tmp_path)
    MEMORY.save(tmp_path)
    return tmp_path


def test_a_folder_of_documented_names_is_enough(folder):
    direct = example()
    plan = example_plan(direct, layers=(LayerStrategy(2), LayerStrategy(8), LayerStrategy(1), LayerStrategy(4)))
    assert load(MODEL, 2, 4, direct.assumed, folder=folder).predict(plan) == direct.predict(plan)


def test_a_file_can_be_named_and_the_folders_only_one_is_found(folder):
    assumed = example().assumed
    (folder / computation_name("bf16", 1024, 16)).rename(folder / "computation_profiling_bf16_mine.json")
    load(MODEL, 2, 4, assumed, folder=folder)
    named = load(MODEL, 2, 4, assumed, folder=folder, allreduce_bandwidth_config_path=folder / allreduce_name(2, 4))
    assert named.predict(example_plan(named)).time_s > 0
    (folder / "computation_profiling_bf16_other.json").write_text("{}")
    with pytest.raises(UserError, match=r"time_profiling_path: .* holds several: .*mine\.json.*other\.json; name one"):
        load(MODEL, 2, 4, assumed, folder=folder)


def test_what_is_missing_is_named_with_its_option_and_its_command(folder):
    assumed = example().assumed
    with pytest.raises(UserError, match="time_profile_mode: 'hybrid' is unknown; choose one of static, batch, seq"):
        load(MODEL, 2, 4, assumed, folder=folder, time_profile_mode="hybrid")
    (folder / memory_name("bf16", 1024, 16)).unlink()
    with pytest.raises(UserError, match=r"no such file; .*`galvatron profile memory` .*memory_profiling_path"):
        load(MODEL, 2, 4, assumed, folder=folder)
    with pytest.raises(UserError, match="time_profiling_path: missing"):
        load(MODEL, 2, 4, assumed)


def test_profiles_of_another_model_are_refused_unless_asked(folder):
    replace(COMPUTATION, meta=Meta(fingerprint=Fingerprint(model="another"))).save(folder)
    assumed = example().assumed
    with pytest.raises(UserError, match="of model another, not of example"):
        load(MODEL, 2, 4, assumed, folder=folder)
    load(MODEL, 2, 4, assumed, folder=folder, allow_foreign_profiles=True)
    replace(HARDWARE, meta=Meta(fingerprint=Fingerprint(device="A"))).save(folder)
    replace(COMPUTATION, meta=Meta(fingerprint=Fingerprint(device="B"))).save(folder)
    with pytest.raises(UserError, match=r"different devices: .* on A, .* on B"):
        load(MODEL, 2, 4, assumed, folder=folder)
    load(MODEL, 2, 4, assumed, folder=folder, allow_foreign_profiles=True)
    wide = replace(MODEL, intermediate_size=2 * MODEL.intermediate_size)
    COMPUTATION.save(folder)
    with pytest.raises(UserError, match=r"parameter_size: .*a layer of example has"):
        load(wide, 2, 4, assumed, folder=folder)


def test_layer_types_have_their_own_shapes_and_times(folder):
    wide = replace(MODEL, layers=2, intermediate_size=2 * MODEL.intermediate_size)
    shapes = (replace(MODEL, layers=2), wide)
    layers = {**MEMORY.layers}
    for (_, sp), lengths in MEMORY.layers.items():
        layers[type(next(iter(layers)))(1, sp)] = {
            SEQ: replace(lengths[SEQ], parameter_mib=wide.layer_parameters * 4 / 2**20)
        }
    replace(MEMORY, layers=layers).save(folder)
    slower = {shape: 2 * ms for shape, ms in COMPUTATION.layer_ms[0].items()}
    replace(COMPUTATION, layer_ms={**COMPUTATION.layer_ms, 1: slower}).save(folder)
    model = load(shapes, 2, 4, example().assumed, folder=folder)
    one, two = (model.layer_cost(LayerStrategy(), StageSetting(8, 16, 2, 1), t) for t in (0, 1))
    assert two.passes_ms.forward == pytest.approx(2 * one.passes_ms.forward)
    assert two.states_mib == pytest.approx(one.states_mib * wide.layer_parameters / MODEL.layer_parameters)
    plan = example_plan(model)
    vocab = model.vocab_cost(plan.vocab, StageSetting(8, 16, 2, 1), "only")
    assert model.predict(plan).stages[0].passes_ms.forward == pytest.approx(
        2 * one.passes_ms.forward + 2 * two.passes_ms.forward + vocab.passes_ms.forward
    )


@real_data
def test_published_profiles_price_a_published_plan():
    """llama2-7b on 8 A800: the plan's 36 GB hold it, and its step is as long as its layers' measured times say."""
    folder = DATA / "galvatron-llama2-7b"
    assumed = Assumptions(True, Precision.BF16, True, 2048)
    model = load(LLAMA2_7B, 1, 8, assumed, folder=folder)
    plan = read_plan(folder / "galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json", 8)
    predicted = model.predict(replace(plan, assumed=assumed))
    assert predicted.stages[0].memory.total_mib < 36 * 1024
    layer_ms = (
        2
        * json.loads((folder / "computation_profiling_bf16_llama2-7b_all.json").read_text())["layertype_0_bsz2_seq2048"]
    )  # two samples a rank
    compute_s = (32 * 3 + 20) * layer_ms / 1000  # forward, twice that backward, 20 layers once more
    assert 1.0 < predicted.time_s / compute_s < 1.15


@real_data
def test_the_worked_number_of_the_documentation():
    page = Path(__file__).parents[2] / "docs" / "dev" / "cost_model.md"
    reported = re.findall(r"\*\*(?:sync = )?([\d.,]+) (?:ms|MiB)\*\*", page.read_text())
    folder = DATA / "galvatron-llama2-7b"
    model = load(LLAMA2_7B, 1, 8, Assumptions(True, Precision.BF16, True, 2048), folder=folder)
    layer = model.layer_cost(LayerStrategy(2), StageSetting(8, 16, 4, 1))
    times = [f"{ms:.3f}" for ms in (layer.passes_ms.forward, layer.passes_ms.backward, layer.sync_ms)]
    assert reported == [
        *times,
        f"{layer.states_mib:,.1f}",
        f"{layer.activation_mib:,.1f}",
        f"{layer.workspace.total_mib:.0f}",
    ]


@real_data
def test_the_other_dialects_published_profiles_price_the_same_model_alike():
    """Same layer (7B) by PaddleNLP's profile: model states agree within the allocators' rounding."""
    ours, theirs = (
        load(LLAMA2_7B, 1, 8, Assumptions(sp, Precision.BF16, True, seq), folder=DATA / name)
        for name, seq, sp in (("galvatron-llama2-7b", 2048, True), ("paddlenlp-llama", 1024, False))
    )
    for strategy in (LayerStrategy(1), LayerStrategy(4)):
        a, b = (m.layer_cost(strategy, StageSetting(8, 16, 2, 1)).states_mib for m in (ours, theirs))
        assert a == pytest.approx(b, rel=0.01)
    plan = uniform_plan(
        layers=32, world_size=8, global_train_batch_size=64, global_tp_deg=2, chunks=4, assumed=theirs.assumed
    )
    assert theirs.predict(plan).time_s > 0


@real_data
def test_two_nodes_charge_for_the_link_between_them():
    folder = DATA / "galvatron-llama2-7b"
    assumed = Assumptions(True, Precision.BF16, True, 2048)
    paths = {"sp_time_path": folder / "sp_time_1nodes_8gpus_per_node.json"}
    one, two = (load(LLAMA2_7B, nodes, 8, assumed, folder=folder, **paths) for nodes in (1, 2))
    costs = [m.layer_cost(LayerStrategy(8), StageSetting(m.world_size, 16, 1, 1)) for m in (one, two)]
    assert costs[0].sync_ms == pytest.approx(0.0, abs=0.01)  # all ranks in one tp group: only the norms are summed
    local_mib = LLAMA2_7B.layer_parameters * 2 / 2**20 / 8
    assert costs[1].sync_ms >= 0.125 * local_mib / 8.13007 * 0.99  # pairs {r, r + 8}: measured 8.13 MiB/ms, overlapped
