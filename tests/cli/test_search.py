"""`galvatron search`: options by every documented name, config files, output, files and exit codes, for any flags and
profile files."""

import hashlib
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cost_examples import COMPUTATION, HARDWARE, MEMORY, MODEL, SEQ
from hypothesis import given
from hypothesis import strategies as st
from plans import damaged

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.cli.search import END, GROUPS, LONG
from paddlenlp_galvatron.model import config_of
from paddlenlp_galvatron.options.aliases import canonical_name
from paddlenlp_galvatron.options.foreign import FOREIGN
from paddlenlp_galvatron.plan import read_plan
from paddlenlp_galvatron.profiles import Shape, Variant

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
CONFIG = config_of(MODEL)
FIELDS = {name: field for group in GROUPS for name, field in group.model_fields.items()}
OPTIONS = {
    "model_size": "example.json", "num_nodes": 2, "num_gpus_per_node": 4, "memory_constraint": 8, "settle_bsz": 32,
    "seq_length": 512,
}  # fmt: skip
PLAN = "galvatron_config_example_2nodes_4gpus_per_node_8GB_bf16.json"


def words(**values: Any) -> list[str]:
    return ["search", *(f"--{name}={value}" for name, value in values.items())]


def write_profiles(folder: Path) -> None:
    (folder / "example.json").write_text(json.dumps(CONFIG))
    for profile in (HARDWARE, COMPUTATION, MEMORY):
        profile.save(folder / "configs")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_profiles(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_is_written_under_its_documented_name_and_explained(folder, galvatron):
    ran = galvatron(*words(**OPTIONS))
    assert (ran.code, ran.err) == (0, "")
    assert "example: 4 layers, sequence length 512, global batch size 32, on 2 x 4 devices of 8 GiB" in ran.out
    assert "samples/s; no plan of the space takes less than" in ran.out
    assert "families of plans searched in" in ran.out and "bound: no plan of it beats" in ran.out
    assert ran.out.splitlines()[-1] == END
    plan = read_plan(folder / "configs" / PLAN)
    assert (plan.world_size, plan.global_batch, len(plan.layers)) == (8, 32, 4)


def test_the_plan_names_the_profiles_that_it_was_searched_from(folder, galvatron):
    assert galvatron(*words(**OPTIONS)).code == 0
    searched = read_plan(folder / "configs" / PLAN).metadata["searched_from"]
    assert searched["model_fingerprint"] == MODEL.fingerprint
    assert {Path(file["path"]).name for file in searched["profiles"]} == {
        "allreduce_bandwidth_2nodes_4gpus_per_node.json",
        "p2p_bandwidth_2nodes_4gpus_per_node.json",
        "overlap_coefficient.json",
        "computation_profiling_bf16_hidden_1024_head_16.json",
        "memory_profiling_bf16_hidden_1024_head_16.json",
    }
    for file in searched["profiles"]:
        assert file["sha256"] == hashlib.sha256((folder / file["path"]).read_bytes()).hexdigest()
    shown = galvatron("plan", "show", f"configs/{PLAN}").out
    assert f"profiles in {Path(searched['profiles'][0]['path']).parent}" in " ".join(shown.split())


def test_a_plan_reports_when_its_profiles_have_changed(folder, galvatron):
    assert galvatron(*words(**OPTIONS, output_config_path="plan.json")).code == 0
    assert "changed" not in galvatron("plan", "check", "plan.json").out
    overlap = folder / "configs" / "overlap_coefficient.json"
    overlap.write_text(overlap.read_text() + " ")
    shown = galvatron("plan", "check", "plan.json")
    assert shown.code == 0
    assert "note: configs/overlap_coefficient.json has changed since the plan was searched" in shown.out


def test_the_log_starts_and_ends_as_documented_and_says_why_families_were_rejected(folder, galvatron):
    galvatron(*words(**OPTIONS, log_dir="mine", disable_tp=1))
    (log,) = (folder / "mine").iterdir()
    lines = log.read_text().splitlines()
    assert log.name.startswith("Search")
    assert lines[0].startswith("Search") and lines[-1] == END
    assert "batch 32, 32 micro-batches, 1 stages, pipedream_flush: divisibility: " in "\n".join(lines)
    assert any("bound: no plan of it beats the best found (at least " in line for line in lines)


def test_json_is_the_last_line_and_reports_all(folder, galvatron):
    ran = galvatron(*words(**OPTIONS, gap=0, top_k=3, disable_tp=1), "--json")
    assert ran.err.strip() == END
    answer = json.loads(ran.out.splitlines()[-1])
    assert answer["feasible"] is True and ran.code == 0
    assert answer["throughput"] == pytest.approx(32 / answer["time_s"])
    assert answer["gap"] == 0 and answer["lower_bound_s"] == answer["time_s"]
    assert answer["search_time_s"] > 0 and answer["peak_rss_mib"] > 1
    assert answer["counts"]["not_divisible"] > 0
    assert answer["reserve_mib"] == 0 and answer["budget_mib"] == 8 * 1024
    assert len(answer["stages"]) == answer["pp_deg"]
    assert all(stage["memory_mib"] <= 8 * 1024 for stage in answer["stages"])
    first, second = answer["runners_up"]
    assert answer["time_s"] <= first["time_s"] <= second["time_s"]
    assert "slower: " in first["why"]
    families = {tuple(one[key] for key in ("chunks", "pp_deg", "pipeline_type")) for one in (answer, first, second)}
    assert len(families) == 3
    assert read_plan(answer["plan"]).micro_batches == answer["chunks"]


def test_runners_up_are_shown_and_written_on_demand(folder, galvatron):
    ran = galvatron(*words(**OPTIONS, top_k=2, output_config_path="out/plan.json"), "--save_runners_up")
    assert ran.code == 0 and "\n2. batch 32 in " in ran.out
    best, second = (read_plan(folder / "out" / name) for name in ("plan.json", "plan_2.json"))
    assert second.metadata["predicted"]["time_s"] >= best.metadata["predicted"]["time_s"]
    assert second.metadata["predicted"]["gap"] >= 0
    newest = max((folder / "out").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert newest.name == "plan.json"


def test_where_nothing_fits_the_answer_says_what_would_do_and_what_binds(folder, galvatron):
    ran = galvatron(*words(**OPTIONS | {"memory_constraint": 0.1}), "--json")
    answer = json.loads(ran.out.splitlines()[-1])
    assert ran.code == 3
    assert answer["feasible"] is False and answer["plan"] is None
    assert ran.err.splitlines()[0] == END and ran.err.splitlines()[1].startswith("error: no plan fits: ")
    assert [first <= last for first, last in answer["binds"]["layers"]] == [True]  # a stage of one chunk
    assert answer["binds"]["term"] in ("model states", "activations", "working memory")
    assert 0 < answer["binds"]["part_mib"] <= answer["binds"]["term_mib"] <= answer["least_memory_mib"]
    assert not (folder / "configs" / PLAN).exists()
    enough = float(ran.err.partition(" plan needs ")[2].split()[0])  # GiB, as the message has it
    assert enough == pytest.approx(answer["least_memory_mib"] / 1024, abs=1e-2)
    assert galvatron(*words(**OPTIONS | {"memory_constraint": enough})).code == 0
    nothing = galvatron(*words(**OPTIONS | {"settle_bsz": 1, "disable_tp": 1, "disable_pp": 1}), "--json")
    assert nothing.code == 3 and json.loads(nothing.out.splitlines()[-1])["least_memory_mib"] is None


def test_the_reserve_is_taken_off_and_shown(folder, galvatron):
    ran = galvatron(*words(**OPTIONS, context_mib=512))
    assert "(reserve 0.500)" in ran.out and "reserve 0.50" in ran.out


YAML = """
ProfileDataParserArgs:
  model_size: example.json
  seqlen_list: [512]
SearchEngineArgs:
  num_nodes: 2
  num-gpus-per-node: 4
  memory_upper_limit: 8
  settle_bsz: 32
  search_granularity: coarse-grained
top_k: None
"""


def test_a_config_file_is_the_same_as_flags_and_flags_win(folder, galvatron):
    coarse = OPTIONS | {"fine_grained_mode": 0}
    assert galvatron(*words(**coarse, output_config_path="flags.json")).code == 0
    (folder / "c.yaml").write_text(YAML)
    (folder / "c.json").write_text(json.dumps(coarse))
    for name in ("c.yaml", "c.json"):
        assert galvatron(*words(config=name, output_config_path=f"{name}.json")).code == 0
        assert read_plan(f"{name}.json") == read_plan("flags.json")
    assert galvatron(*words(config="c.yaml", settle_bsz=64, output_config_path="wins.json")).code == 0
    assert read_plan("wins.json").global_batch == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_constrain: 1", "memory_constrain: unknown option; did you mean memory_constraint?"),
        ("SearchEngineArgs: {max_tp_sizes: 4}", "max_tp_sizes: unknown option; did you mean max_tp_size?"),
        ("max_tp_deg: 4\nmax_tp_size: 8", "max_tp_size: given twice, also as max_tp_deg"),
        ("settle_bsz: 4\nsettle_bsz: 8", 'c.yaml: not valid YAML: "settle_bsz" stands twice'),
        ("a: {settle_bsz: 4}\nsettle_bsz: 8", "c.yaml: settle_bsz stands there twice"),
        ("settle_bsz: [", "c.yaml: not valid YAML at line 2"),
        ("- 1", "c.yaml: holds no options"),
        ("1: 2", "c.yaml: not valid YAML: 1 is a name, but no text"),
        ("settle_bsz: {a: {b: 1}}", "settle_bsz.a is a section within a section"),
        ("settle_bsz: !!python/object:os.system {}", "c.yaml: not valid YAML"),
        ("min_bsz: many", "min_bsz: must be a whole number"),
        ("recommend_min_bsz: 1", "recommend_min_bsz: 1 is not supported"),
    ],
)
def test_a_fault_of_a_config_file_is_reported(folder, galvatron, text, message):
    (folder / "c.yaml").write_text(text)
    ran = galvatron(*words(**OPTIONS, config="c.yaml"))
    assert ran.code == 2 and message in ran.err
    assert galvatron(*words(config="none.yaml")).err == "error: none.yaml: no such file\n"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sp_space": "tp+sp", "tp_consec": 0}, "tp_consec: 0 does not go together with sp_space tp+sp"),
        ({"model_size": "None"}, "model_size: missing"),
        ({"num_nodes": 3}, "allreduce_bandwidth_3nodes_4gpus_per_node.json: no such file"),
        ({"seq_length": 1024}, "sequence length 1024 was not measured"),
        ({"seq_length": 1024, "profile_mode": "sequence"}, "needs 3 sequence lengths but the profile has 512"),
        (
            {"memory_profiling_path": "configs/overlap_coefficient.json"},
            "holds no layertype_… and no other_memory_pp_…",
        ),
        ({"profile_dialect": "paddlenlp"}, "profile_dialect says paddlenlp but the file is galvatron's"),
        ({"costmodel_coe": "1.1"}, "--costmodel_coe: 1.1 is not supported"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, galvatron, changed, message):
    ran = galvatron(*words(**OPTIONS | changed))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err and ran.err.count("\n") == 1


def test_a_folder_of_profiles_that_is_missing_is_named_with_one_like_it(folder, galvatron):
    ran = galvatron(*words(**OPTIONS, profiles="config"))
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert "profiles: no folder config; did you mean configs? Or measure" in ran.err and "--device h100-80gb" in ran.err


def test_all_files_that_are_missing_are_named_at_once(folder, galvatron):
    ran = galvatron(*words(**OPTIONS, num_layers=2, hidden_size=2048))
    assert ran.code == 2 and ran.err.count("no such file") == ran.err.count("\n") == 2


def test_what_was_assumed_is_shown_and_logged_once_and_stands_in_the_json(folder, galvatron):
    """The example has no sp_time file."""
    shown = galvatron(*words(**OPTIONS, log_dir="mine")).out
    (log,) = ((file.read_text()) for file in (folder / "mine").iterdir())
    for text in (shown, log):
        assert text.count("note: sp_time_2nodes_4gpus_per_node.json: not there") == 1
    answer = json.loads(galvatron(*words(**OPTIONS), "--json").out.splitlines()[-1])
    assert len(answer["notes"]) == 1 and answer["notes"][0].startswith("sp_time_2nodes")


def test_layers_of_several_types_are_searched(folder, galvatron):
    """Two wide layers, then four of half the width that see half as long samples."""
    narrow = replace(MODEL, hidden_size=512, heads=8, kv_heads=4, intermediate_size=2048)
    times = {shape: ms / 2 for shape, ms in COMPUTATION.layer_ms[0].items()}
    times |= {Shape(shape.batch, SEQ // 2): ms / 2 for shape, ms in times.items()}
    other = {Shape(b, seq): ms * seq / SEQ for (b, _), ms in COMPUTATION.other_ms.items() for seq in (SEQ, SEQ // 2)}
    replace(COMPUTATION, layer_ms={**COMPUTATION.layer_ms, 1: times}, other_ms=other).save(folder / "configs")
    wide = {variant: lengths[SEQ] for variant, lengths in MEMORY.layers.items()}
    parameter_mib = narrow.layer_parameters * 4 / 2**20
    layers = {
        Variant(1, v.sequence_parallel): {SEQ // 2: replace(one, parameter_mib=parameter_mib)}
        for v, one in wide.items()
    }
    vocab = {variant: {**lengths, SEQ // 2: lengths[SEQ]} for variant, lengths in MEMORY.vocab.items()}
    replace(MEMORY, layers={**MEMORY.layers, **layers}, vocab=vocab).save(folder / "configs")
    types = {"num_layertype": 2, "hidden_size_list": "1024,512", "layer_num_list": "2,4", "seqlen_list": "512,256"}
    ran = galvatron(*words(**{**OPTIONS, "seq_length": None, "gap": 0}, **types, output_config_path="2.json"), "--json")
    assert ran.code == 0, ran.err
    assert len(read_plan("2.json").layers) == 6
    assert json.loads(ran.out.splitlines()[-1])["gap"] == pytest.approx(0, abs=1e-9)
    mixed_up = galvatron(*words(**OPTIONS, **types | {"hidden_size_list": "512,1024"}))
    assert mixed_up.code == 2 and "no such file" in mixed_up.err


def run_script(shell: str, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = {"GALVATRON": str(Path(sys.executable).with_name("galvatron"))}
    command = [shell, str(ROOT / script), *arguments, "--json"]
    environment = {**os.environ, **program, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("script", ["scripts/search_dist.sh", "llm/auto_parallel/galvatron/search_dist.sh"])
def test_the_script_is_the_same_program(folder, galvatron, shell, script):
    assert galvatron(*words(**OPTIONS, sp_space="tp+sp", output_config_path="command.json")).code == 0
    example = {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "4", "MODEL_SIZE": "example.json", "SEQ_LENGTH": "512"}
    arguments = ("--output_config_path", "script.json", "--memory_constraint", "8")  # options behind it win
    ran = run_script(shell, script, *arguments, **example, MEMORY="99", SETTLE_BSZ="32")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1])["feasible"]
    assert read_plan("script.json") == read_plan("command.json")


def test_the_ports_own_arguments_are_taken_on_the_command_line_and_in_the_script(folder, galvatron):
    """Its two groups, all names; the lists alone say the sizes, next to those that it takes from PaddleNLP's model."""
    paths = {
        "time_profile_data_path": "computation_profiling_bf16_hidden_1024_head_16.json",
        "memory_profile_data_path": "memory_profiling_bf16_hidden_1024_head_16.json",
        "overlap_coe_path": "overlap_coefficient.json",
        "allreduce_coe_path": "allreduce_bandwidth_2nodes_4gpus_per_node.json",
        "p2p_coe_path": "p2p_bandwidth_2nodes_4gpus_per_node.json",
        "sp_time_path": "None",
    }
    lists = {"num_layertype": 1, "hidden_size_list": 1024, "layernum_list": 4, "seqlen_list": 512}
    modes = {"time_profile_mode": "static", "memory_profile_mode": "static", "profile_gpu_num": 8}
    sizes = {"num_attention_heads": 16, "vocab_size": MODEL.vocab_size, "intermediate_size": MODEL.intermediate_size}
    parser = (
        modes | lists | sizes | {name: f"configs/{file}" if file != "None" else file for name, file in paths.items()}
    )
    engine = {"search_granularity": "fine-grained", "world_size": 8, "num_nodes": 2, "min_bsz": 32, "max_bsz": 32,
              "bsz_step": 1, "max_tp_size": 8, "max_pp_size": 8, "mixed_precision_type": "bf16",
              "memory_upper_limit": 8, "sp_space": "tp", "layernum": 4, "disable_sdp": 0, "disable_vtp": 0,
              "parallel_search": 0, "log_dir": "search-engine-logs"}  # fmt: skip
    assert all(canonical_name(name, FIELDS) in FIELDS.keys() | FOREIGN.keys() for name in parser | engine)
    ran = galvatron(*words(**parser, **engine, output_config_path="command.json"))
    assert ran.code == 0 and ran.err.splitlines() == [ran.err.strip()] and "--parallel_search" in ran.err
    ran = galvatron(*words(**OPTIONS, max_pp_deg=8, output_config_path="ours.json"))
    assert (ran.code, ran.err) == (0, "")
    assert read_plan("command.json") == read_plan("ours.json")
    for one in ("hidden_size_list", "layernum_list"):
        without = {name: value for name, value in (parser | engine).items() if name != one}
        ran = galvatron(*words(**{name: value for name, value in without.items() if name != "layernum"}))
        assert ran.code == 2 and "model_size: missing" in ran.err
    blocks = {
        "ProfileDataParserArgs": " ".join(f"--{name} {value}" for name, value in parser.items()),
        "SearchEngineArgs": " ".join(f"--{name} {value}" for name, value in engine.items()),
    }
    ran = run_script("sh", "scripts/search_dist.sh", "--output_config_path", "script.json", **blocks)
    assert ran.returncode == 0, ran.stderr
    assert read_plan("script.json") == read_plan("command.json")


@pytest.mark.skipif(not DATA.exists(), reason="no published profile files next to the checkout")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("galvatron-llama2-7b", {"memory_constraint": 36, "settle_bsz": 16, "seq_length": 2048, "sp_space": "tp+sp"}),
        ("galvatron-llama2-7b", {"world_size": 16, "memory_upper_limit": 36, "settle_bsz": 16, "seq_length": 2048}),
        ("paddlenlp-llama", {"memory_upper_limit": 40, "settle_bsz": 128, "seqlen_list": 1024, "layer_num_list": 16,
                             "profile_mode": "batch", "sequence_parallel": 0, "sp_space": "tp+sp"}),
    ],
)  # fmt: skip
def test_published_profiles_of_both_dialects_are_searched(folder, galvatron, name, options):
    ran = galvatron(*words(model_size="llama2-7b", profiles=DATA / name, **options), "--json")
    assert ran.code == 0, ran.err
    answer = json.loads(ran.out.splitlines()[-1])
    assert answer["feasible"] and answer["gap"] < 1e-9


def run_quietly(*arguments: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        return main(list(arguments)), err.getvalue()


def check_ending(code: int, err: str) -> None:
    assert code in (0, 2, 3), err
    on_a_busy_machine = (LONG, "searching: ")
    lines = [line for line in err.splitlines() if not line.startswith(on_a_busy_machine)]
    assert all(line.startswith("error: ") and len(line) < 600 and "unexpected" not in line for line in lines), err
    assert bool(lines) == (code != 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    write_profiles(folder)
    return folder


VALUES = st.one_of(
    st.sampled_from(["0", "1", "2", "-1", "8", "None", "", "tp+sp", "sp", "batch", "zero2", "3d", "nan", "1,2"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
)
# Options that could take long or write elsewhere are left alone.
FUZZED = sorted(set(FIELDS) - {"max_bsz", "output_config_path", "log_dir"})


@given(st.dictionaries(st.sampled_from(FUZZED), VALUES, max_size=3))
def test_random_flags_end_in_a_plan_or_a_clear_error(place, flags):
    fixed = {**OPTIONS, "model_size": place / "example.json", "profiles": place / "configs"}
    written = {"output_config_path": place / "plan.json", "log_dir": place / "logs"}
    check_ending(*run_quietly(*words(**{**fixed, **flags, **written})))


@given(st.data())
def test_damaged_profiles_end_in_a_plan_or_a_clear_error(place, data):
    files = sorted((place / "configs").glob("*.json"))
    file = data.draw(st.sampled_from(files))
    sound = file.read_text()
    content = data.draw(damaged(json.loads(sound)))
    options = {**OPTIONS, "model_size": place / "example.json", "profiles": place / "configs"}
    options |= {"output_config_path": place / "plan.json", "log_dir": place / "logs"}
    options["allow_foreign_profiles"] = data.draw(st.sampled_from([0, 1]))
    try:
        file.write_text(json.dumps(content))
        check_ending(*run_quietly(*words(**options)))
    finally:
        file.write_text(sound)
