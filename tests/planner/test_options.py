"""Options by every name, presets, and what each leaves of the space."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.plan import DataParallel, LayerStrategy, Schedule, VocabStrategy
from paddlenlp_galvatron.plan.mesh import divisors
from paddlenlp_galvatron.planner import SearchOptions
from paddlenlp_galvatron.planner.space import PlanFamily, Space, families
from paddlenlp_galvatron.profiles.data_sheet import data_sheets

from .random_cost import model_of


def space_of(stages: int = 1, gpus: int = 4, **values: Any) -> tuple[list[LayerStrategy], list[VocabStrategy]]:
    options = SearchOptions.from_mapping({"num_gpus_per_node": gpus, "seq_length": 12} | values)
    family = PlanFamily(12, 1, stages, Schedule.GPIPE, gpus)
    space = Space(model_of(4), options.assumptions, options)
    return space.layers(family), space.vocabularies(family)


def test_other_names_mean_the_same() -> None:
    options = SearchOptions.from_mapping(
        {"memory-upper-limit": 36, "max_tp_size": 4, "max_pp_size": 2, "bsz_step": 16, "time_profile_data_path": "t"}
    )
    assert (options.memory_constraint, options.max_tp_deg, options.max_pp_deg, options.bsz_scale) == (36, 4, 2, 16)
    assert str(options.time_profiling_path) == "t"
    assert not SearchOptions.from_mapping({"search_granularity": "coarse-grained"}).fine_grained_mode


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tp_dge": 4}, "max_tp_dge: unknown option; did you mean max_tp_deg"),
        ({"max_tp_deg": 4, "max_tp_size": 8}, "max_tp_size: given twice"),
        ({"memory_constraint": -1}, "memory_constraint: must be more than 0"),
        ({"memory_constraint": "nan"}, "memory_constraint: must be a finite number"),
        ({"settle_bsz": 0}, "settle_bsz: must be a number above 0 and at most 1000000, or -1"),
        ({"settle_bsz": 3_000_000_000}, "settle_bsz: must be a number above 0 and at most"),
        ({"settle_bsz": 1e30}, "settle_bsz: "),
        ({"settle_chunk": 2**31 - 1}, "settle_chunk: must be a number above 0 and at most"),
        ({"memory_constraint": 1e300}, "memory_constraint: must be at most 1000000000"),
        ({"context_mib": 1e300}, "context_mib: must be at most"),
        ({"simplest_within": 101}, "simplest_within: must be at most 100"),
        ({"top_k": 10**6}, "top_k: must be at most 1000"),
        ({"min_bsz": 16, "max_bsz": 8}, "max_bsz: 8 is below min_bsz 16"),
        ({"max_bsz": 10**6, "bsz_scale": 1}, "bsz_scale: 999993 batches up to max_bsz are too many"),
        ({"num_nodes": 10**6}, "num_nodes: must be at most 65536"),
        ({"num_nodes": 65_536, "num_gpus_per_node": 2}, "world_size: must be at most 65536"),
        ({"pipeline_type": "1f1b"}, "pipeline_type: must be"),
        ({"search_space": "dp+tpp"}, "search_space: 'tpp' is unknown"),
        ({"sp_space": "tp+sp", "tp_consec": 0}, "tp_consec: 0 does not go together with sp_space"),
        ({"simplest_within": -1}, "simplest_within: must be at least"),
    ],
)
def test_bad_options_are_reported(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SearchOptions.from_mapping(values)


@given(
    st.dictionaries(
        st.sampled_from(sorted(SearchOptions.model_fields)),
        st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=8), st.booleans(), st.lists(st.integers())),
        max_size=4,
    )
)
def test_any_values_give_options_or_a_clear_error(values: dict[str, Any]) -> None:
    try:
        SearchOptions.from_mapping(values)
    except UserError as error:
        assert all(fault.strip() for fault in error.faults)


@pytest.mark.parametrize(
    ("values", "batches"),
    [
        ({}, [256]),
        ({"settle_bsz": -1}, [256]),
        ({"batch": 64}, [64]),
        ({"settle_bsz": 64, "max_bsz": 8}, [64]),
        ({"min_bsz": 16}, [16]),
        ({"max_bsz": 24}, [8, 16, 24]),
        ({"settle_bsz": "-1", "min_bsz": 16, "max_bsz": 24}, [16, 24]),
        ({"min_bsz": 16, "max_bsz": 44, "bsz_scale": 8}, [16, 24, 32, 40]),
    ],
)
def test_the_batches_that_are_tried(values: dict[str, Any], batches: list[int]) -> None:
    assert SearchOptions.from_mapping(values).batches == batches


def test_flags_are_read_as_scripts_give_them() -> None:
    assert SearchOptions.from_mapping({"settle_bsz": "-1", "settle_chunk": "4"}).settle_chunk == 4
    options = SearchOptions.from_mapping({"disable_pp": "1", "fine_grained_mode": "0", "embed_sdp": "None"})
    assert options.disable_pp and not options.fine_grained_mode and options.embed_sdp is None


def test_any_divisor_is_a_degree() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    layers, vocabularies = space_of(gpus=6)
    assert {layer.degree for layer in layers} == {vocab.degree for vocab in vocabularies} == {1, 2, 3, 6}
    assert {layer.degree for layer in space_of(gpus=8)[0]} == {2, 4}, "12 samples, 12 heads"


@pytest.mark.parametrize(
    ("values", "gone"),
    [
        ({"disable_tp": True}, lambda layer: layer.tp > 1),
        ({"disable_sp": True, "sp_space": "tp+sp"}, lambda layer: layer.ulysses),
        ({"disable_dp": True}, lambda layer: layer.degree < 4),
        ({"disable_sdp": True}, lambda layer: layer.dp_type is DataParallel.ZERO3),
        ({"disable_ckpt": True}, lambda layer: layer.recompute),
        ({"max_tp_deg": 2}, lambda layer: layer.degree > 2),
        ({"search_space": "dp+tp"}, lambda layer: layer.recompute or layer.dp_type is DataParallel.ZERO3),
        ({"search_space": "sdp+dp+ckpt"}, lambda layer: layer.degree > 1),
    ],
)
def test_what_is_disabled_is_gone_and_nothing_else(values: dict[str, Any], gone: Any) -> None:
    full, _ = space_of(sp_space=values.get("sp_space", "tp"))
    layers, _ = space_of(**values)
    assert layers == [layer for layer in full if not gone(layer)] != full


def test_the_vocabulary_obeys_its_own_options() -> None:
    assert {vocab.degree for vocab in space_of(disable_vtp=True)[1]} == {1}
    shared = [vocab for vocab in space_of(embed_sdp=1)[1] if vocab.degree < 4]
    assert {vocab.dp_type for vocab in shared} == {DataParallel.ZERO3}
    assert {vocab.dp_type for vocab in space_of(embed_sdp=0)[1]} == {DataParallel.ZERO2}


def test_strided_groups_on_demand() -> None:
    assert all(layer.consecutive for layer in space_of()[0])
    assert {layer.degree for layer in space_of(tp_consec=0)[0] if not layer.consecutive} == {2}


def test_zero3_needs_a_rank_to_share_with() -> None:
    layers, _ = space_of(sp_space="tp+sp")
    assert {layer.ulysses for layer in layers if layer.degree == 4 and layer.dp_type is DataParallel.ZERO3} == {True}


def test_families_follow_batches_chunks_stages_and_schedules() -> None:
    options = SearchOptions.from_mapping({"num_gpus_per_node": 4, "min_bsz": 4, "max_bsz": 6, "bsz_scale": 2})
    found = list(families(options, 4, layers=3))
    assert {(f.global_batch, f.micro_batches) for f in found} == {
        (4, 1), (4, 2), (4, 4), (6, 1), (6, 2), (6, 3), (6, 6),
    }  # fmt: skip
    assert {f.stages for f in found} == {1, 2}, "four stages are more than the three layers"
    assert len(found) == 7 * (1 + 2) - 2, "one stage has no schedule, two have two, and one for one micro-batch"
    fixed = SearchOptions.from_mapping({"settle_bsz": 12, "settle_chunk": 3, "pipeline_type": "gpipe"})
    assert {(f.global_batch, f.micro_batches, f.schedule) for f in families(fixed, 8, 8)} == {(12, 3, Schedule.GPIPE)}


@pytest.mark.parametrize(
    ("values", "nodes", "gpus"),
    [
        ({}, 1, 8),
        ({"world_size": 4}, 1, 4),
        ({"world_size": 64}, 8, 8),
        ({"world_size": "64", "num_nodes": 4}, 4, 16),
        ({"world_size": 12, "num_gpus_per_node": 4}, 3, 4),
        ({"num_nodes": 2}, 2, 8),
        ({"num_nodes": 2, "num_gpus_per_node": 4, "world_size": 8}, 2, 4),
    ],
)
def test_the_cluster_by_its_size_or_its_sides(values: dict[str, Any], nodes: int, gpus: int) -> None:
    options = SearchOptions.from_mapping(values)
    assert (options.num_nodes, options.num_gpus_per_node, options.world_size) == (nodes, gpus, nodes * gpus)


@pytest.mark.parametrize("values", [{"world_size": 12}, {"world_size": 8, "num_nodes": 3}, {"world_size": 0}])
def test_a_cluster_that_contradicts_itself_is_reported(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="world_size"):
        SearchOptions.from_mapping(values)


@pytest.mark.parametrize(
    ("values", "time", "memory"),
    [
        ({"profile_mode": "batch"}, "batch", "static"),
        ({"profile_mode": "sequence"}, "sequence", "sequence"),
        ({"profile_mode": "sequence", "memory_profile_mode": "static"}, "sequence", "static"),
        ({"profile_mode": "None"}, "static", "static"),
    ],
)
def test_one_profile_mode_stands_for_both(values: dict[str, Any], time: str, memory: str) -> None:
    options = SearchOptions.from_mapping(values)
    assert (options.time_profile_mode, options.memory_profile_mode) == (time, memory)


@pytest.mark.parametrize(
    ("given", "cluster"),
    [
        ({}, (1, 4)),
        ({"world_size": 2}, (1, 2)),
        ({"world_size": 8}, (2, 4)),
        ({"num_nodes": 3}, (3, 4)),
        ({"num_nodes": 2, "world_size": 4}, (2, 2)),
        ({"num_gpus_per_node": 1, "num_nodes": 2}, (2, 1)),
    ],
)
def test_a_node_has_as_many_gpus_as_its_data_sheet_says(tmp_path, given, cluster):
    sheet = json.loads(data_sheets()["h100-80gb"].read_text()) | {"gpus_per_node": 4}
    (tmp_path / "four.json").write_text(json.dumps(sheet))
    options = SearchOptions.from_values({"device": str(tmp_path / "four.json"), **given})
    assert (options.num_nodes, options.num_gpus_per_node) == cluster


@pytest.mark.parametrize("given", [{"num_nodes": 32, "world_size": 512}, {"num_gpus_per_node": 16}])
def test_more_gpus_than_a_node_of_the_data_sheet_has_are_refused(given):
    with pytest.raises(UserError, match="num_gpus_per_node: 16, but a node of h100-80gb has 8; set num_nodes to"):
        SearchOptions.from_values({"device": "h100"} | given)
