"""Published profile sets: each is loaded and searched, or refused once and with all reasons."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.published_profiles import LLAMA, PUBLISHED, Published, memory, named, runs_mib, runs_ms, times

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.reading import read_json
from paddlenlp_galvatron.cost_model import CostModel, load
from paddlenlp_galvatron.planner import SearchOptions, search
from paddlenlp_galvatron.profiles.raw_runs import derived_memory, derived_times

DATA = Path(__file__).parents[3] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.exists(), reason="no published profile files next to the checkout")
ONE_BATCH = {"settle_bsz": 16, "settle_chunk": 2, "memory_constraint": 40, "max_bsz": 16}


def write(folder: Path, published: Published) -> None:
    for name, content in published.files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def loaded(folder: Path, published: Published) -> tuple[CostModel, SearchOptions, list[str]]:
    write(folder, published)
    paths = {k: folder / v for k, v in published.options.items() if k.endswith("_path")}
    options = SearchOptions.from_mapping(
        ONE_BATCH | {"seq_length": published.seq, "profiles": folder} | published.options | paths
    )
    received: list[str] = []
    cost = load(
        published.model, options.num_nodes, options.num_gpus_per_node, options.assumptions,
        **options.profile_arguments, note=received.append,
    )  # fmt: skip
    return cost, options, list(dict.fromkeys(received))


def require_each(wanted: tuple[str, ...], stated: list[str]) -> None:
    """Every line is wanted, and every wanted one is there, once."""
    left = list(stated)
    for part in wanted:
        found = next((line for line in left if part in line), None)
        assert found, f"{part!r} is not in {left}"
        left.remove(found)
    assert not left


@pytest.mark.parametrize("published", [p for p in PUBLISHED if not p.faults], ids=lambda p: p.name)
def test_a_published_set_is_searched_and_what_was_assumed_is_reported_once(tmp_path, published):
    cost, options, notes = loaded(tmp_path, published)
    require_each(published.notes, notes)
    result = search(published.model, cost, options)
    assert result.best, result.need
    assert 0 < result.time_s < 60


@pytest.mark.parametrize("published", [p for p in PUBLISHED if p.faults], ids=lambda p: p.name)
def test_a_set_that_cannot_be_used_is_refused_with_all_reasons(tmp_path, published):
    with pytest.raises(UserError) as error:
        loaded(tmp_path, published)
    require_each(published.faults, list(error.value.faults))


def test_times_of_a_type_that_the_model_does_not_have_are_named(tmp_path):
    (two,) = (p for p in PUBLISHED if p.name == "two types of layers")
    cost, options, notes = loaded(tmp_path, replace(two, model=LLAMA))
    require_each(("layertype_1 ignored: the model has layers of 1 type",), notes)
    assert search(LLAMA, cost, options).best


def test_comments_are_read_over_and_strings_and_places_stay(tmp_path):
    path = tmp_path / "commented.json"
    path.write_text('{"a//b": 1, // "c": 2,\n "d": [",]", "\\\\",],\n}\n')
    assert read_json(path, comments=True) == {"a//b": 1, "d": [",]", "\\"]}
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(path)
    path.write_text('{"a": 1, // one\n "b" 2}')
    with pytest.raises(UserError, match="line 2, column 6"):
        read_json(path, comments=True)


def flat(value: object, place: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {place: value}
    return {key: number for name, inner in value.items() for key, number in flat(inner, f"{place}/{name}").items()}


@real_data
@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("galvatron-llama2-7b/memory_profiling_bf16_llama2-7b_all.json", "galvatron"),
        ("paddlenlp-llama/memory_profiling_bf16_llama.json", "paddlenlp"),
        ("galvatron-llama2-7b/computation_profiling_bf16_llama2-7b_all.json", None),
        ("paddlenlp-llama/computation_profiling_bf16_llama_rank[0].json", None),
    ],
)
def test_raw_runs_report_what_galvatron_itself_derived_from_them(name, dialect):
    content = json.loads((DATA / name).read_text())
    raw = {key: value for key, value in content.items() if not key.startswith(("layertype", "other"))}
    derived = derived_memory(raw, dialect) if dialect else derived_times(raw)[0]
    published = {key: value for key, value in content.items() if key not in raw}
    assert flat(derived) == pytest.approx(flat(published), rel=1e-9)


def test_raw_runs_alone_cost_what_the_derived_entries_cost(tmp_path):
    """The fixture's runs and entries are of one model, so the two ways to read it agree."""
    for folder in ("raw", "derived"):
        (tmp_path / folder).mkdir()
    raw = Published("", named("a", runs_ms(LLAMA, (2, 4), (1, 2), [2048]), runs_mib(LLAMA, [2048])))
    entries = memory(LLAMA, [2048], extra_mib=0.0)
    derived = Published("", named("a", times(LLAMA, (1, 2), [2048]), entries))
    results = [search(LLAMA, *loaded(tmp_path / name, p)[:2]) for name, p in (("raw", raw), ("derived", derived))]
    assert results[0].time_s == pytest.approx(results[1].time_s, rel=1e-9)
    assert results[0].plan.layers == results[1].plan.layers


def test_without_megatron_sp_a_layer_is_split_by_the_degree(tmp_path):
    """A layer that keeps 10 of 34 bytes whole without Megatron-SP keeps an eighth with it at degree 8."""
    published = Published("", named("a", times(LLAMA, (1, 2), [2048]), memory(LLAMA, [2048], sp=False)))
    cost, _, notes = loaded(tmp_path, published)
    kept = {tp: cost.profiles.memory.activation_mib(0, tp, 2048, sequence_parallel=True) for tp in (1, 8)}
    assert kept[8] == pytest.approx(kept[1] / 8)
    without = cost.profiles.memory.activation_mib(0, 8, 2048, sequence_parallel=False)
    assert without == pytest.approx(kept[1] * (10 + 24 / 8) / 34)
    assert any("under sequence_parallel a layer of degree t keeps 1/t" in note for note in notes)
