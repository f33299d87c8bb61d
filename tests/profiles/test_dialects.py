"""The same measurements as Galvatron and as its PaddleNLP port write them: one cost, one plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from cost_examples import COMPUTATION, HARDWARE, MEMORY, MODEL, SEQ

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import StageSetting, load
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, Plan, Precision
from paddlenlp_galvatron.planner import SearchOptions, search

CLUSTER = {"num_nodes": 2, "num_gpus_per_node": 4}
LENGTHS = (256, SEQ, 1024)


def galvatron_files() -> dict[str, dict[str, Any]]:
    """As Galvatron writes them: raw runs next to the derived keys, several lengths, no metadata of ours."""
    layer_ms = {(b, s): ms * s / SEQ for (b, _), ms in COMPUTATION.layer_ms[0].items() for s in LENGTHS}
    times = {f"layertype_0_bsz{b}_seq{s}": ms for (b, s), ms in layer_ms.items()}
    times |= {f"layertype_other_bsz{b}_seq{s}": 2 * ms for (b, s), ms in layer_ms.items()}
    times |= {f"layernum[{n}]_bsz{b}_seq{s}": (n + 2) * b * ms for n in (2, 4) for (b, s), ms in layer_ms.items()}
    memory: dict[str, Any] = {
        "1_1_8_sp": {"layernum[1]_bsz8_seq512_rank0_ms": 1.0},
        "1_2_4_vtp_sp": {},
        "1_1_8_c_sp": {},
    }
    for (layer_type, sp), lengths in MEMORY.layers.items():
        layer = lengths[SEQ]
        memory[f"layertype_{layer_type}{'_sp' * sp}"] = {
            str(s): {
                "parameter_size": layer.parameter_mib,
                "tp_activation_per_bsz_dict": {
                    **{str(t): mib * s / SEQ for t, mib in layer.activation_mib.items()},
                    "checkpoint": layer.checkpoint_mib * s / SEQ,
                },
            }
            for s in LENGTHS
        }
    roles = {"only": "off", "first": "on_first", "last": "on_last"}
    for (role, sp), lengths in MEMORY.vocab.items():
        vocab = lengths[SEQ]
        memory[f"other_memory_pp_{roles[role]}{'_sp' * sp}"] = {
            str(s): {
                "model_states": {str(t): mib for t, mib in vocab.states_mib.items()},
                "activation": {str(t): mib * s / SEQ for t, mib in vocab.activation_mib.items()},
            }
            for s in LENGTHS
        }
    bandwidth = {f"allreduce_size_{n}_consec_{int(c)}": v for (n, c), v in HARDWARE.allreduce_mib_per_ms.items()}
    return {
        "time": times,
        "memory": memory,
        "allreduce": bandwidth,
        "p2p": {f"pp_size_{n}": v for n, v in HARDWARE.p2p_mib_per_ms.items()},
        "overlap": {"overlap_coe": HARDWARE.overlap_coe},
        "sp_time": {f"{kind}_size_{n}_{m}MB_time": 0.05 + m / 90 for kind in ("allreduce", "all2all") for n in (2, 4)
                    for m in (1, 64)},
    }  # fmt: skip


def paddlenlp_files() -> dict[str, dict[str, Any]]:
    """As the port writes them: bf16 weights, 18 bytes of states, no _sp, no _consec_ (so no strided groups)."""
    files = galvatron_files()
    memory: dict[str, Any] = {"1_1_8_False": {"layernum[1]_bsz8_seq512_first_ms": 1.0}, "1_1_8_True": {}}
    for key, lengths in files["memory"].items():
        if not key.startswith(("layertype", "other")) or key.endswith("_sp"):
            continue
        for entry in lengths.values():
            if "parameter_size" in entry:
                entry["parameter_size"] /= 2
            else:
                entry["model_states"] = {t: mib * 18 / 16 for t, mib in entry["model_states"].items()}
        memory[key] = lengths
    plain = {key.replace("_consec_1", ""): v for key, v in files["allreduce"].items() if "_consec_0" not in key}
    return files | {"memory": memory, "allreduce": plain}


def cost_of(folder: Path, files: dict[str, dict[str, Any]], seq: int = SEQ, **options: Any):
    paths = {name: folder / f"{name}.json" for name in files}
    for name, content in files.items():
        paths[name].write_text(json.dumps(content))
    assumed = Assumptions(options.pop("sequence_parallel", False), Precision.BF16, seq_length=seq)
    return load(
        MODEL, 2, 4, assumed,
        time_profiling_path=paths["time"], memory_profiling_path=paths["memory"],
        allreduce_bandwidth_config_path=paths["allreduce"], p2p_bandwidth_config_path=paths.get("p2p"),
        overlap_coe_path=paths["overlap"], sp_time_path=paths.get("sp_time"), **options,
    )  # fmt: skip


def best_plan(cost: Any, **options: Any) -> tuple[Plan, float]:
    values = {
        "sequence_parallel": cost.assumed.sequence_parallel,
        "seq_length": cost.assumed.seq_length,
        "settle_bsz": 32,
    }
    found = search(MODEL, cost, SearchOptions.from_mapping(values | CLUSTER | {"memory_constraint": 2} | options))
    return found.plan, found.time_s


@pytest.mark.parametrize("sp_space", ["tp", "tp+sp"])
def test_both_dialects_lead_to_the_same_plan(tmp_path, sp_space):
    plans = [best_plan(cost_of(tmp_path, files), sp_space=sp_space) for files in (galvatron_files(), paddlenlp_files())]
    assert plans[0][0] == plans[1][0]
    assert plans[0][1] == pytest.approx(plans[1][1])


@pytest.mark.parametrize("files", [galvatron_files, paddlenlp_files])
@pytest.mark.parametrize(
    ("time_mode", "memory_mode"), [("static", "static"), ("batch", "static"), ("sequence", "sequence")]
)
def test_every_mode_prices_a_length_that_was_measured(tmp_path, files, time_mode, memory_mode):
    cost = cost_of(tmp_path, files(), time_profile_mode=time_mode, memory_profile_mode=memory_mode)
    assert best_plan(cost) == best_plan(cost_of(tmp_path, files()))


@pytest.mark.parametrize("files", [galvatron_files, paddlenlp_files])
def test_sequence_mode_prices_other_lengths(tmp_path, files):
    modes = {"time_profile_mode": "sequence", "memory_profile_mode": "sequence"}
    twice, four = (cost_of(tmp_path, files(), seq=seq, **modes).layer_cost for seq in (1024, 2048))
    stage = StageSetting(8, 8, 1, 1)
    short, long = (price(LayerStrategy(), stage) for price in (twice, four))
    assert long.passes_ms.forward == pytest.approx(2 * short.passes_ms.forward), (
        "the example's time is proportional to the length"
    )
    assert long.activation_mib == pytest.approx(2 * short.activation_mib)
    with pytest.raises(UserError, match="sequence length 2048 was not measured"):
        cost_of(tmp_path, files(), seq=2048).layer_cost(LayerStrategy(), stage)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_or_without_the_suffix_of_megatron_sp(tmp_path, sequence_parallel):
    """A file that has only the one is read for the other, too, where degree 1 or the split gives it."""
    files = galvatron_files()
    other = {k: v for k, v in files["memory"].items() if k.endswith("_sp") or not k.startswith(("layer", "other"))}
    cost = cost_of(tmp_path, files | {"memory": other}, sequence_parallel=sequence_parallel)
    plan, time_s = best_plan(cost, max_tp_deg=1 if not sequence_parallel else 8)
    assert time_s > 0 and len(plan.layers) == MODEL.layers


def test_without_sp_time_messages_are_priced_by_bandwidth(tmp_path):
    files = galvatron_files()
    del files["sp_time"]
    assert best_plan(cost_of(tmp_path, files), sp_space="tp+sp")[1] > 0


def test_an_unmarked_memory_file_is_recognized_by_its_layers_weights(tmp_path):
    files = paddlenlp_files()
    bare = {key: value for key, value in files["memory"].items() if key.startswith(("layertype", "other"))}
    notes: list[str] = []
    found = best_plan(cost_of(tmp_path, files | {"memory": bare}, note=notes.append))
    assert found == best_plan(cost_of(tmp_path, files))
    assert sum("units are not given; taken as paddlenlp's" in note for note in notes) == 1
    entry = next(iter(bare["layertype_0"].values()))
    size, entry["parameter_size"] = entry["parameter_size"], 3 * entry["parameter_size"]
    with pytest.raises(UserError, match="galvatron search --profile_dialect galvatron"):
        cost_of(tmp_path, files | {"memory": bare})
    entry["parameter_size"] = size
    with pytest.raises(UserError, match=r"parameter_size: .* galvatron search --profile_dialect"):
        cost_of(tmp_path, files | {"memory": bare}, profile_dialect="galvatron")


@pytest.mark.parametrize("files", [galvatron_files, paddlenlp_files])
def test_raw_runs_of_time_alone_are_the_same(tmp_path, files):
    content = files()
    raw = {key: value for key, value in content["time"].items() if key.startswith("layernum")}
    found, wanted = (best_plan(cost_of(tmp_path, content | {"time": time})) for time in (raw, content["time"]))
    assert found[0] == wanted[0] and found[1] == pytest.approx(wanted[1])


@pytest.mark.parametrize("files", [galvatron_files, paddlenlp_files])
@pytest.mark.parametrize(
    ("name", "kept", "message"),
    [
        (
            "time",
            "layernum[2]",
            "holds no layertype_.* time and no raw runs that contain .*`galvatron profile computation`",
        ),
        ("memory", "1_", "holds no layertype_.* entry and no raw runs that contain one; .*`galvatron profile memory`"),
        ("time", "nothing", "holds no layertype_"),
        ("allreduce", "nothing", "holds no allreduce_size_"),
    ],
)
def test_raw_runs_that_report_nothing_and_empty_files_name_the_command(tmp_path, files, name, kept, message):
    content = files()
    content[name] = {key: value for key, value in content[name].items() if key.startswith(kept)}
    with pytest.raises(UserError, match=message):
        cost_of(tmp_path, content)


def test_too_few_points_name_those_to_measure(tmp_path):
    files = galvatron_files()
    one_batch = {key: ms for key, ms in files["time"].items() if "_bsz1_" in key}
    with pytest.raises(UserError, match="needs two batch sizes or more at sequence length 512 but the profile has 1"):
        best_plan(cost_of(tmp_path, files | {"time": one_batch}, time_profile_mode="batch"))
    two_lengths = {key: ms for key, ms in files["time"].items() if not key.endswith("_seq1024")}
    cost = cost_of(tmp_path, files | {"time": two_lengths}, seq=768, time_profile_mode="sequence",
                   memory_profile_mode="sequence")  # fmt: skip
    with pytest.raises(UserError, match=r"needs 3 sequence lengths but the profile has 256, 512; .* around 768"):
        best_plan(cost)


def test_without_p2p_bandwidth_there_are_no_pipelines(tmp_path):
    files = galvatron_files()
    del files["p2p"]
    with pytest.raises(UserError, match=r"pp_size_2: .* by p2p_bandwidth_config_path, or search with max_pp_"):
        best_plan(cost_of(tmp_path, files))
    assert len(best_plan(cost_of(tmp_path, files), max_pp_deg=1)[0].stages) == 1
