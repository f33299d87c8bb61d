"""Profile files: written and read back, both dialects, and everything that can be wrong with one."""

import json
import os
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from cost_examples import COMPUTATION, HARDWARE, LAYER_MIB, MEMORY, MODEL
from hypothesis import given
from hypothesis import strategies as st
from plans import damaged

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import load
from paddlenlp_galvatron.model import measured_fingerprint
from paddlenlp_galvatron.plan import Assumptions, DataParallel, LayerStrategy, Plan, Precision, VocabStrategy
from paddlenlp_galvatron.plan.mesh import Axis
from paddlenlp_galvatron.profiles import Collective, HardwareProfile, MessageGroup, Meta, PassTimes, ProfileFile, Shape
from paddlenlp_galvatron.profiles import files as profiles
from paddlenlp_galvatron.profiles.computation import CommPointKey, CommPointTimes, ComputationProfile, PassKey
from paddlenlp_galvatron.profiles.files import LARGEST_BYTES, MOST_FILES, OVERLAP_NAME, Fingerprint
from paddlenlp_galvatron.profiles.hardware import read_allreduce, read_messages, read_overlap, read_p2p
from paddlenlp_galvatron.profiles.identity import require_parameter_size, require_same_device, require_same_model
from paddlenlp_galvatron.profiles.memory import LayerMemory, MemoryProfile, Variant, VocabMemory, VocabVariant

DATA = Path(__file__).parents[3] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.exists(), reason="no published profile files next to the checkout")
META = Meta(
    fingerprint=Fingerprint(device="example", device_count=8, dtype="bf16", model=measured_fingerprint([MODEL])),
    spread={"x": 0.01},
)
DOCUMENTED = ("bf16", 1024, 16)

sizes = st.integers(1, 64)
values = st.floats(1e-6, 1e6)


@given(
    st.dictionaries(st.tuples(st.integers(2, 8), st.booleans()), values, min_size=1),
    st.dictionaries(st.integers(2, 8), values),
    st.dictionaries(
        st.builds(MessageGroup, st.sampled_from(Collective), st.integers(2, 8), st.booleans()),
        st.dictionaries(st.sampled_from([2**k / 1024 for k in range(21)] + [3.5]), values, min_size=1),
    ),
    st.floats(1, 3),
    st.dictionaries(st.sampled_from(Collective), st.floats(1, 3)),
)
def test_hardware_files_are_read_back(tmp_path_factory, allreduce, p2p, messages, overlap, by_kind):
    folder = tmp_path_factory.mktemp("hardware")
    profile = HardwareProfile(2, 4, allreduce, p2p, messages, overlap, META, overlap_by_kind=by_kind)
    profile.save(folder)
    read = HardwareProfile.load(2, 4, folder=folder)
    assert read == replace(profile, meta=read.meta)
    assert read.meta.fingerprint == META.fingerprint


def test_model_files_are_read_back(tmp_path):
    computation = replace(
        COMPUTATION,
        passes={
            PassKey("layertype_0", 2, 512, 2): PassTimes(1.0, 2.5),
            PassKey("head", 1, 512): PassTimes(3.0, 5.0, 3.0),
        },
        points={CommPointKey("layertype_0", 2, 512, Axis.CONTEXT): CommPointTimes(0.25, 0.5)},
        optimizer_ms_per_million=0.5,
        meta=META,
    )
    path = computation.save(tmp_path)
    read = ComputationProfile.load(path, *DOCUMENTED)
    assert read == replace(computation, meta=read.meta)
    layers = dict(MEMORY.layers)
    layers[Variant(0, True)] = {512: LayerMemory(80.0, {1: 40.0, 2: 20.0}, 1.0, {1: 12.0})}
    vocab = dict(MEMORY.vocab)
    vocab[VocabVariant("only", False)] = {512: replace(vocab[VocabVariant("only", False)][512], kept_mib={1: 90.0})}
    memory = replace(MEMORY, layers=layers, vocab=vocab, mask_mib={512: 0.5}, meta=META)
    read_memory = MemoryProfile.load(memory.save(tmp_path), *DOCUMENTED)
    assert read_memory == replace(memory, meta=read_memory.meta)
    for meta in (read.meta, read_memory.meta):
        assert meta.fingerprint == META.fingerprint
        assert meta.units


def test_files_carry_the_documented_names_and_keys(tmp_path):
    HARDWARE.save(tmp_path)
    COMPUTATION.save(tmp_path)
    MEMORY.save(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "allreduce_bandwidth_2nodes_4gpus_per_node.json",
        "p2p_bandwidth_2nodes_4gpus_per_node.json",
        "overlap_coefficient.json",
        "computation_profiling_bf16_hidden_1024_head_16.json",
        "memory_profiling_bf16_hidden_1024_head_16.json",
    }
    content = {name: json.loads((tmp_path / name).read_text()) for name in names}
    assert content[profiles.allreduce_name(2, 4)]["allreduce_size_4_consec_0"] == 5
    assert content[profiles.p2p_name(2, 4)]["pp_size_8"] == 2.5
    assert content[OVERLAP_NAME]["overlap_coe"] == 1.2
    assert content[profiles.computation_name(*DOCUMENTED)]["layertype_0_bsz4_seq512"] == pytest.approx(1.7 / 4)
    memory = content[profiles.memory_name(*DOCUMENTED)]
    assert memory["layertype_0_sp"]["512"]["tp_activation_per_bsz_dict"] == {
        "1": 40.0, "2": 20.0, "4": 10.0, "8": 5.0, "checkpoint": 1.0,
    }  # fmt: skip
    assert memory["other_memory_pp_on_last"]["512"]["model_states"]["4"] == pytest.approx(32000 * 1024 * 16 / 2**20 / 4)
    assert set(memory) >= {"layertype_0", "other_memory_pp_off_sp", "other_memory_pp_on_first"}


def test_a_message_of_whole_mib_stands_where_galvatron_looks_and_others_beside_it(tmp_path):
    messages = {
        MessageGroup(Collective.ALL_REDUCE, 4): {0.25: 0.01, 1.0: 0.02, 64.0: 0.9},
        MessageGroup(Collective.ALL_GATHER, 4, False): {1.0: 0.03},
    }
    HardwareProfile(1, 4, {(4, True): 10}, messages_ms=messages).save(tmp_path)
    content = json.loads((tmp_path / profiles.sp_time_name(1, 4)).read_text())
    ours = content.pop("galvatron")["messages_ms"]
    assert content == {"allreduce_size_4_1MB_time": 0.02, "allreduce_size_4_64MB_time": 0.9}
    assert ours == {"allreduce_size_4_0.25MB_time": 0.01, "allgather_size_4_consec_0_1MB_time": 0.03}
    path, notes = tmp_path / profiles.sp_time_name(1, 4), list[str]()
    path.write_text(json.dumps({**content, "galvatron": {"messages_ms": {**ours, "comment": 1}}}))
    assert read_messages(path, notes.append) == messages
    assert "skipped" in notes[0] and '"comment"' in notes[0]


def memory_file(folder: Path, **changed: object) -> Path:
    """A memory file of raw numbers without a mark of its dialect."""
    layer = {"512": {"parameter_size": 30.0, "tp_activation_per_bsz_dict": {"1": 40.0, "checkpoint": 1.0}}}
    table = {"512": {"model_states": {"1": 900.0}, "activation": {"1": 200.0}}}
    path = folder / "memory.json"
    path.write_text(json.dumps({"layertype_0": layer, "other_memory_pp_off": table, **changed}))
    return path


def test_dialects_are_distinguished_and_brought_to_one_unit(tmp_path):
    galvatron = MemoryProfile.load(memory_file(tmp_path, **{"1_1_8_sp": {}}), *DOCUMENTED)
    paddlenlp = MemoryProfile.load(memory_file(tmp_path, **{"1_1_8_False": {}}), *DOCUMENTED)
    assert galvatron.layers[Variant(0, False)][512].parameter_mib == 30
    assert paddlenlp.layers[Variant(0, False)][512].parameter_mib == 60
    assert paddlenlp.vocab[VocabVariant("only", False)][512].states_mib[1] == pytest.approx(900 * 16 / 18)
    reported = MemoryProfile.load(memory_file(tmp_path), *DOCUMENTED, dialect="paddlenlp")
    assert reported.layers == paddlenlp.layers
    noted = MemoryProfile.load(memory_file(tmp_path, galvatron={"dialect": "paddlenlp"}), *DOCUMENTED)
    assert noted.layers == paddlenlp.layers
    # A file read in one dialect is written in the other, and says so.
    assert MemoryProfile.load(paddlenlp.save(tmp_path), *DOCUMENTED).layers == paddlenlp.layers


def test_a_dialect_that_nothing_reports_or_that_is_named_twice_is_an_error(tmp_path):
    with pytest.raises(UserError, match="--profile_dialect"):
        MemoryProfile.load(memory_file(tmp_path), *DOCUMENTED)
    with pytest.raises(UserError, match="profile_dialect says galvatron but the file is paddlenlp's"):
        MemoryProfile.load(memory_file(tmp_path, **{"1_1_8_True": {}}), *DOCUMENTED, dialect="galvatron")
    with pytest.raises(UserError, match="both dialects"):
        MemoryProfile.load(memory_file(tmp_path, **{"1_1_8_True": {}, "1_1_8_c": {}}), *DOCUMENTED)


@pytest.mark.parametrize(
    ("reader", "content", "message"),
    [
        (read_allreduce, {"allreduce_size_4_consec_2": 1}, "unknown key; expected allreduce_size_"),
        (read_allreduce, {"allreduce_size_4_consec_1": -3}, "no possible value .MiB per ms"),
        (read_allreduce, {"allreduce_size_4_consec_1": "fast"}, 'must be a number .*not "fast"'),
        (read_allreduce, {"allreduce_size_4": 1, "allreduce_size_4_consec_1": 2}, "stands there twice"),
        (read_allreduce, {}, "holds no allreduce_size_"),
        (read_p2p, {"pp_size_0": 1}, "whole number"),
        (read_overlap, {}, "overlap_coe"),
        (read_overlap, {"overlap_coe": 0.9}, "below 1"),
        (read_overlap, {"overlap_coe": 1.1, "galvatron": {"overlap_by_kind": {"allgather": 0.9}}}, "below 1"),
        (read_overlap, {"overlap_coe": 1.1, "galvatron": {"overlap_by_kind": {"gather": 1}}}, "expected .allreduce"),
        (read_messages, {"allreduce_size_8_MB_time": 1}, "unknown key"),
        (read_messages, {"galvatron": {"messages_ms": {"allreduce_size_8_1MB_time": None}}}, "must be a number"),
        (read_messages, {"galvatron": {"format_version": 9}}, "galvatron.format_version"),
        (read_p2p, [], "one JSON object"),
    ],
)
def test_a_fault_is_named_with_file_and_key(tmp_path, reader, content, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as error:
        reader(path)
    assert all(str(path) in fault for fault in error.value.faults)


def test_raw_runs_alone_report_the_rest_or_say_which_command_does(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layernum[2]_bsz1_seq2048": 15.0, "layernum[4]_bsz1_seq2048": 23.0}))
    read = ComputationProfile.load(path, *DOCUMENTED)
    assert (read.layer_ms, read.other_ms) == ({0: {Shape(1, 2048): 4.0}}, {Shape(1, 2048): 7.0})
    path.write_text(json.dumps({"1_1_8_sp": {"layernum[1]_bsz8_seq2048_rank0_ms": 904.3}}))
    with pytest.raises(UserError, match=r"no raw runs that contain one; .*`galvatron profile memory`"):
        MemoryProfile.load(path, *DOCUMENTED)


def test_a_profile_of_another_model_or_cluster_is_refused(tmp_path):
    ours = Meta(fingerprint=Fingerprint(model=measured_fingerprint([MODEL]), dtype="bf16"))
    named = "computation_profiling_bf16_hidden_1024_head_16.json"
    require_same_model(named, ours, [MODEL], Precision.BF16)
    require_same_model(named, ours, [replace(MODEL, layers=99, max_position_embeddings=1)], Precision.BF16)
    for other in ([replace(MODEL, vocab_size=99)], [MODEL, MODEL]):
        with pytest.raises(UserError, match="the profile is of model"):
            require_same_model(named, ours, other, Precision.BF16)
    with pytest.raises(UserError, match="the profile is of model 123"):
        require_same_model(named, Meta(fingerprint=Fingerprint(model="123")), [MODEL], Precision.BF16)
    with pytest.raises(UserError, match="measured in bf16, not in fp32"):
        require_same_model("times.json", ours, [MODEL], Precision.FP32)
    with pytest.raises(UserError, match="hidden size 4096 and 32 heads"):
        require_same_model("memory_profiling_bf16_hidden_4096_head_32.json", Meta(), [MODEL], Precision.BF16)
    with pytest.raises(UserError, match="name says fp16"):
        require_same_model("memory_profiling_fp16_x.json", Meta(), [MODEL], Precision.BF16)
    with pytest.raises(UserError, match="parameter_size"):
        require_parameter_size("x.json", MODEL.layer_parameters * 2 / 2**20, MODEL)
    HARDWARE.save(tmp_path)
    with pytest.raises(UserError, match="a group of 8 ranks in a cluster of 4"):
        read_allreduce(tmp_path / profiles.allreduce_name(2, 4), world_size=4)
    with pytest.raises(UserError, match=r"allreduce_bandwidth_3nodes_4gpus_per_node\.json: no such file"):
        HardwareProfile.load(3, 4, folder=tmp_path)
    # Named by path, a file of fewer nodes is taken by its name.
    assert (
        HardwareProfile.load(30, 4, allreduce_bandwidth_config_path=tmp_path / profiles.allreduce_name(2, 4)).num_nodes
        == 2
    )


@pytest.fixture(scope="module")
def sound_files(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("sound")
    messages = {MessageGroup(Collective.ALL_TO_ALL, 2): {0.5: 0.1, 1.0: 0.2}}
    replace(HARDWARE, messages_ms=messages, meta=META).save(folder)
    passes = {PassKey("layertype_0", batch, 512, 2): PassTimes(1.0 * batch, 2.5 * batch, 1.0) for batch in (2, 4)}
    times = {Shape(batch, seq): seq / 1000 for batch in (1, 4) for seq in (256, 512, 2048)}
    replace(COMPUTATION, layer_ms={0: times}, other_ms=times, passes=passes, meta=META).save(folder)
    layers = {**MEMORY.layers, Variant(0, True): {512: LayerMemory(LAYER_MIB, {1: 40.0, 2: 30.0}, 1.0, {1: 12.0})}}
    last = {512: VocabMemory({1: 500.0}, {1: 198.0}, {1: 66.0})}
    replace(MEMORY, layers=layers, vocab={**MEMORY.vocab, VocabVariant("last", True): last}, meta=META).save(folder)
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_words_never_with_a_traceback(tmp_path_factory, sound_files, data):
    folder = tmp_path_factory.mktemp("damaged")
    name = data.draw(st.sampled_from(sorted(sound_files)))
    content = data.draw(damaged(sound_files[name]))
    for other, sound in sound_files.items():
        (folder / other).write_text(json.dumps(content if other == name else sound))
    text = data.draw(st.none() | st.integers(0, 200))
    if text is not None:
        (folder / name).write_text((folder / name).read_text()[:text])
    try:
        HardwareProfile.load(2, 4, folder=folder)
        ComputationProfile.load(folder / profiles.computation_name(*DOCUMENTED), *DOCUMENTED)
        MemoryProfile.load(folder / profiles.memory_name(*DOCUMENTED), *DOCUMENTED)
    except UserError as error:
        assert error.faults
        assert all(fault.startswith(str(folder / name)) and len(fault) < 600 for fault in error.faults)
        return
    plans = st.builds(
        LayerStrategy,
        st.sampled_from([1, 2, 4]),
        st.booleans(),
        st.booleans(),
        st.sampled_from(DataParallel),
        st.booleans(),
    )
    assumed = Assumptions(
        data.draw(st.booleans()), Precision.BF16, data.draw(st.booleans()), data.draw(st.sampled_from([512, 1024]))
    )
    modes = {
        "time_profile_mode": data.draw(st.sampled_from(["static", "batch", "sequence"])),
        "memory_profile_mode": data.draw(st.sampled_from(["static", "sequence"])),
    }
    plan = Plan(
        world_size=8,
        global_batch=32,
        micro_batches=2,
        stages=(2, 2),
        layers=tuple(data.draw(plans) for _ in range(4)),
        vocab=VocabStrategy(data.draw(st.sampled_from([1, 2, 4]))),
        assumed=assumed,
    )
    try:
        predicted = load(MODEL, 2, 4, assumed, folder=folder, allow_foreign_profiles=data.draw(st.booleans()), **modes)
        assert predicted.predict(plan).time_s > 0
    except UserError as error:
        assert error.faults and all(len(fault) < 600 for fault in error.faults)


@real_data
@pytest.mark.parametrize(
    ("name", "nodes", "time_name", "memory_file_name", "seq", "parameter_mib", "sp"),
    [
        ("galvatron-llama2-7b", 2, "computation_profiling_bf16_llama2-7b_all.json",
         "memory_profiling_bf16_llama2-7b_all.json", 2048, 778.2236328125, True),
        ("galvatron-llama2-7b", 1, "computation_profiling_bf16_llama2-7b_all.json",
         "memory_profiling_bf16_llama2-7b_all.json", 2048, 778.2236328125, True),
        ("paddlenlp-llama", 1, "computation_profiling_bf16_llama_rank[0].json",
         "memory_profiling_bf16_llama.json", 1024, 2 * 386.572265625, False),
    ],
)  # fmt: skip
def test_published_files_of_both_dialects_are_read_and_kept(
    tmp_path, name, nodes, time_name, memory_file_name, seq, parameter_mib, sp
):
    folder, shape = DATA / name, ("bf16", 4096, 32)
    hardware = HardwareProfile.load(nodes, 8, folder=folder)
    computation = ComputationProfile.load(folder / time_name, *shape)
    memory = MemoryProfile.load(folder / memory_file_name, *shape)
    assert len(computation.layer_ms[0]) == 12 and set(computation.layer_ms[0]) >= {Shape(1, seq), Shape(12, seq)}
    assert memory.layers[Variant(0, sp)][seq].parameter_mib == pytest.approx(parameter_mib)
    hardware.save(tmp_path)
    again = HardwareProfile.load(nodes, 8, folder=tmp_path)
    assert again == replace(hardware, meta=again.meta)
    saved = ComputationProfile.load(computation.save(tmp_path), *shape)
    assert saved == replace(computation, meta=saved.meta)
    kept = MemoryProfile.load(memory.save(tmp_path), *shape)
    assert (kept.layers, kept.vocab) == (memory.layers, memory.vocab)


def test_profiles_of_different_devices_are_refused():
    def measured_on(device: str | None, name: str) -> ProfileFile:
        return ProfileFile(name, "0", Fingerprint(device=device))

    require_same_device([measured_on("H200", "a.json"), measured_on(None, "b.json"), measured_on("H200", "c.json")])
    with pytest.raises(UserError, match=r"a.json on H200, c.json on A100; profile on one, or galvatron search"):
        require_same_device([measured_on("H200", "a.json"), measured_on("A100", "c.json")])


def test_a_folder_may_stand_for_the_file_in_it(tmp_path):
    HARDWARE.save(tmp_path)
    read = HardwareProfile.load(
        2, 4, allreduce_bandwidth_config_path=tmp_path, p2p_bandwidth_config_path=tmp_path, sp_time_path=tmp_path
    )
    assert (read.allreduce_mib_per_ms, read.p2p_mib_per_ms) == (HARDWARE.allreduce_mib_per_ms, HARDWARE.p2p_mib_per_ms)
    assert read.overlap_coe == 1 and not read.messages_ms
    assert [Path(file.path).name for file in read.files] == [profiles.allreduce_name(2, 4), profiles.p2p_name(2, 4)]


def test_files_that_a_plan_names_are_compared_within_limits(tmp_path):
    """For any size and number of them that a plan of others names, also with right checksums."""
    large, small = tmp_path / "large.json", tmp_path / "small.json"
    large.touch()
    os.truncate(large, LARGEST_BYTES + 1)
    small.write_text("{}")
    right = {path: sha256(path.read_bytes()).hexdigest() for path in (large, small)}
    summaries = [{"path": str(path), "sha256": digest} for path, digest in right.items()]
    assert ProfileFile.changed(summaries) == [str(large)]
    os.truncate(large, LARGEST_BYTES)
    summaries[0]["sha256"] = sha256(large.read_bytes()).hexdigest()
    assert ProfileFile.changed(summaries) == []
    many = [{"path": str(tmp_path / f"{number}.json"), "sha256": ""} for number in range(MOST_FILES + 1)]
    for summary in many:
        Path(summary["path"]).write_text("{}")
    assert len(ProfileFile.changed(many)) == MOST_FILES
