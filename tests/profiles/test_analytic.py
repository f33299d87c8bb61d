"""Profiles from arithmetic against measurements: published times, and Paddle's own memory on this machine."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import CostModel, load
from paddlenlp_galvatron.cost_model.costs import Profiles
from paddlenlp_galvatron.model import kinds_of
from paddlenlp_galvatron.model.layer import PARTLY, Fused
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, ModelShape, Precision
from paddlenlp_galvatron.profiles import Collective, ComputationProfile, Meta, PassTimes, Variant, VocabVariant
from paddlenlp_galvatron.profiles.analytic import (
    CHECKPOINT_CALLS,
    FUSED_CALLS,
    LAYER_CALLS,
    ON_GPUS,
    analytic_computation,
    analytic_memory,
    layer_numbers_per_token,
    recompute_saving_per_token,
)
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.profiles.data_sheet import DataSheet, Device, data_sheets, load_data_sheet, sheet_of_driver
from paddlenlp_galvatron.profiles.memory_use import MemoryUse
from paddlenlp_galvatron.profiles.network import Network, Place, analytic_hardware

DATA = Path(__file__).parents[3] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.exists(), reason="no published profile files next to the checkout")
LLAMA2_7B = ModelShape("llama2-7b", "llama", 32, 4096, 11008, 32, 32, 32000, 4096)
SMALL = ModelShape("small", "llama", 4, 256, 640, 8, 8, 1000, 512)


@real_data
@pytest.mark.parametrize(
    ("name", "seq", "fused", "error"),  # as docs/dev/cost_model.md says
    [
        ("galvatron-llama2-7b/computation_profiling_bf16_llama2-7b_all.json", 2048, ON_GPUS, 0.12),
        # PaddleNLP's default
        ("paddlenlp-llama/computation_profiling_bf16_llama_rank[0].json", 1024, Fused.ATTENTION, 0.08),
    ],
)
def test_an_a100s_data_sheet_meets_times_measured_on_its_kind(name, seq, fused, error):
    measured = ComputeTimes(ComputationProfile.load(DATA / name, "bf16", 4096, 32))
    derived = ComputeTimes(analytic_computation(LLAMA2_7B, load_data_sheet("a100-80gb"), Precision.BF16, [seq], fused))
    for samples in (4, 8, 12):
        assert derived.layer(0, samples, seq).forward_ms == pytest.approx(
            measured.layer(0, samples, seq).forward_ms, rel=error
        )
        assert derived.head(samples, seq).forward_ms > 0
    head = measured.head(12, 2048).forward_ms if seq == 2048 else None
    if head:
        assert derived.head(12, seq).forward_ms == pytest.approx(head, rel=0.1)


def test_a_layer_takes_at_least_as_long_as_its_host_launches_it(tmp_path):
    """With 16 tokens a GPU waits for its host; with 4,096 it does not. A host runs ahead: a pass may be short next to a
    long one, and messages give it time, too."""
    sheet = load_data_sheet("h800-80gb")
    profile = analytic_computation(LLAMA2_7B, sheet, Precision.BF16, [16, 4096])
    launch_ms, again_ms = (FUSED_CALLS * 0.032, (FUSED_CALLS + CHECKPOINT_CALLS) * 0.032)
    assert profile.launch == PassTimes(*map(pytest.approx, (launch_ms, launch_ms, again_ms)))
    plain = analytic_computation(LLAMA2_7B, sheet, Precision.BF16, [16], Fused.ATTENTION)
    assert plain.launch.forward_ms == pytest.approx(LAYER_CALLS * 0.032)
    host_ms = 2 * launch_ms + again_ms
    for each in (profile, ComputationProfile.load(profile.save(tmp_path), "bf16", 4096, 32)):
        short, long = (ComputeTimes(each).layer(0, 1, seq) for seq in (16, 4096))
        assert short.forward_ms + short.backward_ms + short.recompute_ms < host_ms
        waiting = short.launched(each.launch, 0.0)
        assert waiting.forward_ms + waiting.backward_ms + waiting.recompute_ms == pytest.approx(host_ms)
        assert long.launched(each.launch, 0.0) == long
        assert short.launched(each.launch, host_ms) == short
        without = replace(short, recompute_ms=0.0).launched(each.launch, 0.0)
        assert without.forward_ms + without.backward_ms == pytest.approx(2 * launch_ms)
        assert without.recompute_ms == 0
    slower = sheet.model_copy(update={"launch": sheet.launch.model_copy(update={"value": 64.0})})
    assert analytic_computation(LLAMA2_7B, slower, Precision.BF16, [16]).launch.forward_ms == pytest.approx(
        2 * launch_ms
    )


SIZES = [(128, 384, 8, 8), (128, 320, 8, 4), (320, 512, 4, 4)]
OTHERS = [*product(["llama"], SIZES[1:]), *product(["qwen2"], SIZES)]


@pytest.mark.parametrize(
    ("family", "size"),
    [
        *zip(["llama", "qwen3"], SIZES[:2], strict=True),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS),
    ],
    ids=str,
)
def test_memory_is_what_paddle_keeps_to_two_percent(family, size):
    """fp32 and plain attention: the form that runs on CPU, where Paddle's statistics are exact."""
    pytest.importorskip("paddle")
    from paddlenlp_galvatron.measure.journal import Journal
    from paddlenlp_galvatron.measure.memory import MemoryProfiler

    hidden, inner, heads, kv_heads = size
    shape = ModelShape("probe", family, 4, hidden, inner, heads, kv_heads, 1000, 512)
    if family == "qwen3":
        shape = replace(shape, own_head_dim=2 * shape.head_dim)
    seq, degrees = 64, (1, 2, 4)
    profiler = MemoryProfiler([shape], Journal(), samples=2)
    measured = profiler.measure([seq], degrees, Meta(), lambda _: None)
    derived = analytic_memory(shape, Precision.FP32, [seq], Fused.NONE)
    for sequence_parallel in (True, False):
        variant = Variant(0, sequence_parallel)
        truth, ours = measured.layers[variant][seq], derived.layers[variant][seq]
        assert ours.parameter_mib == pytest.approx(truth.parameter_mib, rel=0.02)
        assert ours.checkpoint_mib == pytest.approx(truth.checkpoint_mib, rel=0.02)
        for tp in degrees:
            assert ours.activation_mib[tp] == pytest.approx(truth.activation_mib[tp], rel=0.02), (tp, sequence_parallel)
            for parts in PARTLY:
                where = (shape, seq, tp, sequence_parallel, Fused.NONE)
                kept = zip(layer_numbers_per_token(*where), recompute_saving_per_token(*where, parts), strict=True)
                kept_mib = 4 * seq / 2**20 * sum(whole - spared for whole, spared in kept)
                spared_mib = MemoryUse(measured).recompute_saving_mib(0, parts, tp, seq, sequence_parallel)
                assert kept_mib == pytest.approx(truth.activation_mib[tp] - spared_mib, rel=0.02), (parts, *where)
        for role in ("only", "first", "last"):
            tables, known = (p.vocab[VocabVariant(role, sequence_parallel)][seq] for p in (derived, measured))
            for tp in degrees:
                assert tables.states_mib[tp] == pytest.approx(known.states_mib[tp], rel=0.02), (role, tp)


@pytest.mark.parametrize("name", data_sheets())
def test_every_figure_of_a_data_sheet_has_a_source(name):
    sheet = load_data_sheet(name)
    reported = json.loads(data_sheets()[name].read_text())
    reported.pop("published", None)
    reached = [figure for stack in reported.pop("stacks", {}).values() for figure in stack.values()]
    figures = [*reached, *(figure for figure in reported.values() if isinstance(figure, dict))]
    assert all(figure["source"] and figure["unit"] and figure["checked"] for figure in figures)
    assert sheet.link.value * sheet.gpus_per_node > sheet.network.value
    assert 0 < sheet.matmul_efficiency.value < 1


def test_a_cluster_shares_its_nodes_links():
    sheet = load_data_sheet("h100-80gb")
    network = Network(analytic_hardware(sheet, 16))
    inside, node = 450 * 0.82 * 1e9 / 2**20 / 1e3, 400 * 0.85 * 1e9 / 2**20 / 1e3
    assert network.bandwidth_mib_per_ms(Place(8)) == pytest.approx(inside)
    assert network.bandwidth_mib_per_ms(Place(128, 16)) == pytest.approx(min(node, inside))
    assert network.bandwidth_mib_per_ms(Place(16, 16, False)) == pytest.approx(min(node, inside) / 8)
    assert network.send_ms(16, 100) == pytest.approx(0.0084 + 0.014 + 100 / (node / 8))
    small, large = (network.collective_ms(Collective.ALL_REDUCE, Place(8), mib) for mib in (1e-3, 256))
    assert small == pytest.approx(0.0066 + 2 * 7 * 0.6e-3, rel=0.01)  # NCCL's ring by LL
    assert large == pytest.approx(0.025 + 9 / 8 * 256 / (inside * 0.685 / 0.82))  # by switches that add
    four = network.collective_ms(Collective.ALL_REDUCE, Place(2), 256)
    assert four == pytest.approx(0.0084 + 2 * 3.4e-3 + 256 / inside)  # of two ranks by a ring, Simple


def test_derived_files_are_marked_and_price_plans(tmp_path):
    sheet = load_data_sheet("h200-141gb")
    analytic_hardware(sheet, 2, 4).save(tmp_path)
    computation = analytic_computation(SMALL, sheet, Precision.BF16, [128, 256])
    computation.save(tmp_path)
    memory = analytic_memory(SMALL, Precision.BF16, [128, 256])
    memory.save(tmp_path)
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text())["galvatron"]["analytic"] is True
    assumed = Assumptions(True, Precision.BF16, True, 256)
    plan = uniform_plan(
        layers=4, world_size=8, global_train_batch_size=32, global_tp_deg=2, pp_deg=2, chunks=4, assumed=assumed
    )
    network = Network(analytic_hardware(sheet, 2, 4))
    direct = CostModel(SMALL, Profiles.of(network, ComputeTimes(computation), MemoryUse(memory)), assumed)
    assert load(SMALL, 2, 4, assumed, folder=tmp_path).predict(plan) == direct.predict(plan)


def test_more_of_anything_costs_more():
    sheet = load_data_sheet("a100-80gb")
    faster = sheet.model_copy(update={"matmul_16bit": sheet.matmul_16bit.model_copy(update={"value": 1000.0})})
    for other, seq, model in ((sheet, 512, SMALL), (sheet, 256, replace(SMALL, intermediate_size=1280))):
        base = ComputeTimes(analytic_computation(SMALL, sheet, Precision.BF16, [256])).layer(0, 1024, 256)
        more = ComputeTimes(analytic_computation(model, other, Precision.BF16, [seq])).layer(0, 1024, seq)
        assert more.forward_ms > base.forward_ms
    quick = ComputeTimes(analytic_computation(SMALL, faster, Precision.BF16, [256])).layer(0, 1024, 256)
    assert quick.forward_ms < base.forward_ms


def test_an_unknown_or_broken_data_sheet_is_an_error_in_words(tmp_path):
    with pytest.raises(UserError, match=r"b300 is no known device; known: a100-40gb, .*write a data sheet"):
        load_data_sheet("b300")
    sheet = json.loads(data_sheets()["a100-80gb"].read_text())
    sheet["link"]["value"] = -1
    del sheet["network"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(sheet))
    with pytest.raises(UserError, match=r"link\.value") as error:
        load_data_sheet(path)
    assert len(error.value.faults) == 2 and "network" in error.value.faults[1]


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        *(("H100", "h100-80gb"), ("a100", "a100-80gb"), ("A100-40GB", "a100-40gb"), ("a100_40gb", "a100-40gb")),
        *(("RTX 4090", "rtx4090-24gb"), ("rtx-3090", "rtx3090-24gb"), ("4090", "rtx4090-24gb"), ("H20", "h20-96gb")),
        *(("NVIDIA H100 80GB HBM3", "h100-80gb"), ("nvidia geforce rtx 3090", "rtx3090-24gb"), ("L20", "l20-48gb")),
        *(("H100 NVL", "h100-nvl-94gb"), ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"), ("GB200", "gb200-186gb")),
    ],
)
def test_a_shipped_sheet_is_known_by_every_spelling_of_its_name(reported, name):
    assert load_data_sheet(reported).name == name


def test_a_device_is_known_by_its_drivers_full_name_alone():
    """Other GPUs whose names share words with one: other memory, links or clocks."""
    known = {"NVIDIA A100-SXM4-40GB": 39.4, "A100-SXM4-80GB": 79.3, "NVIDIA H100 80GB HBM3": 79.1, "NVIDIA H20": 95.0}
    assert {name: Device.named(name).memory_gib for name in known} == known
    for other in ("NVIDIA A100-SXM-64GB", "NVIDIA A100X", "NVIDIA H100 96GB HBM3", "NVIDIA L40"):
        device = Device.named(other)
        assert device.is_gpu and device.memory_gib is device.peak_16bit_tflops is None
    assert Device.named("NVIDIA A10", 22.1).memory_gib == 22.1
    assert Device.named("NVIDIA A100-SXM4-40GB", 39.59).memory_gib == 39.59  # as its driver says


def sheet_with(tmp_path: Path, **units: tuple[float, str]) -> DataSheet:
    sheet = json.loads(data_sheets()["a100-80gb"].read_text())
    for name, (value, unit) in units.items():
        sheet[name] |= {"value": value, "unit": unit}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(sheet))
    return load_data_sheet(path)


def test_figures_are_read_in_their_units(tmp_path):
    sheet = sheet_with(
        tmp_path,
        memory=(95, "GB"),
        matmul_16bit=(0.5, "PFLOP/s, dense"),
        memory_bandwidth=(2, "TB/s"),
        network=(1600, "Gb/s a direction and node"),
        matmul_efficiency=(70, "%"),
        product_start=(0.01, "ms"),
    )
    assert sheet.memory.value == pytest.approx(88.4756, rel=1e-5) and sheet.memory.unit == "GiB"
    assert (sheet.matmul_16bit.value, sheet.memory_bandwidth.value, sheet.network.value) == (500, 2000, 200)
    assert (sheet.matmul_efficiency.value, sheet.product_start.value) == (pytest.approx(0.7), 10)
    assert sheet.network.unit == "GB/s a direction and node"


@pytest.mark.parametrize(
    ("figure", "unit"),
    [("memory", "Gib"), ("memory", "GB/s"), ("link", "GB/s both directions"), ("matmul_16bit", "TFLOP/s, sparse")],
)
def test_an_unknown_unit_is_refused_with_those_that_are_known(tmp_path, figure, unit):
    with pytest.raises(UserError, match=rf"{figure}: unit '{unit}' is unknown; give the figure in "):
        sheet_with(tmp_path, **{figure: (600, unit)})


@pytest.mark.parametrize("name", data_sheets())
def test_a_shipped_device_has_no_name_of_another(name):
    own = load_data_sheet(name)
    assert sheet_of_driver(own.device) == own and all(sheet_of_driver(driver) == own for driver in own.drivers)


def test_each_kind_of_layer_is_derived_as_if_all_layers_were_like_it():
    experts = {"experts": 8, "experts_per_token": 2, "expert_size": 64}
    mixed = replace(SMALL, family="qwen3_moe", layers=5, dense_layers=(0, 3), **experts)
    narrow = replace(SMALL, hidden_size=SMALL.hidden_size // 2, seq_length=128)
    sheet, precision = load_data_sheet("h100"), Precision.BF16
    for given in ((mixed,), (SMALL, narrow)):
        kinds = kinds_of(given)
        computation, memory = (
            analytic_computation(given, sheet, precision, [256]),
            analytic_memory(given, precision, [256]),
        )
        for number, kind in enumerate(kinds):
            seq = kind.seq_length or 256
            alone = ComputeTimes(analytic_computation(kind, sheet, precision, [seq]))
            assert ComputeTimes(computation).layer(number, 8, seq, 2) == alone.layer(0, 8, seq, 2)
            own, its = memory.layers, analytic_memory(kind, precision, [seq]).layers
            assert own[Variant(number, True)][seq] == its[Variant(0, True)][seq]
        first, last = (analytic_memory(one, precision, [one.seq_length or 256]) for one in (kinds[0], kinds[-1]))
        assert memory.vocab[VocabVariant("first", True)] == first.vocab[VocabVariant("first", True)]
        assert memory.vocab[VocabVariant("last", True)] == last.vocab[VocabVariant("last", True)]
    assert computation.layer_ms.keys() == {0, 1}
    assert (
        analytic_computation(mixed, sheet, precision, [256]).experts
        == analytic_computation(kinds_of((mixed,))[1], sheet, precision, [256]).experts
    )
