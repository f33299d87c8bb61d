"""Options of other programs: each states a default, is noted, or is refused by name; none is dropped."""

from itertools import combinations

import pytest

from paddlenlp_galvatron.api import fit
from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.options.foreign import ELSEWHERE, FOREIGN, MODEL_FIELDS, PROGRAMS
from paddlenlp_galvatron.options.group import canonical_options, read_words
from paddlenlp_galvatron.options.uniform import DegreeOptions, UniformOptions
from paddlenlp_galvatron.runtime.engine import LOSS_SCALE
from paddlenlp_galvatron.training.prepare import GROUPS

TRAINING = {name for group in GROUPS for name in group.model_fields}
OFF = {"0", "", "-1"}  # an option that says no more than that it is off
# Options that may be on without a note, and the behaviour here, in every run, that fulfils them.
DONE = {
    "swiglu": "gated MLPs", "normalization": "RMSNorm", "position_embedding_type": "rotary positions",
    "no_position_embedding": "rotary positions", "rotary_percent": "all of a head is turned",
    "use_rotary_position_embeddings": "rotary positions", "rotary_seq_len_interpolation_factor": "a factor of 1",
    "dataset": "pretraining reads .bin and .idx", "train_mode": "galvatron train trains",
    "use_pipeline_costmodel": "every pipeline is simulated", "costmodel_coe": "a factor of 1",
    "profile_granularity": "layers are measured whole", "profile_unit": "layers are measured whole",
    "profile_flow_control": "missing points are measured, measured ones used",
    "fp16_opt_level": "fp32 masters of 16-bit weights", "do_train": "galvatron train trains",
    "rope_scaling_factor": "a factor of 1", "scale_loss": "engine.LOSS_SCALE",
}  # fmt: skip


def fate_of(name: str, value: str, dashes: bool = False) -> str:
    """The outcome of `train --name value`."""
    notes: list[str] = []
    word = f"--{name.replace('_', '-') if dashes else name}"
    try:
        pairs, loose = read_words([f"{word}={value}"], dict.fromkeys(TRAINING, False), notes.append)
    except UserError as error:
        assert str(error).startswith(f"{word}: {value} is not supported: "), error
        return "refused"
    assert not pairs and not loose, "it has no use here"
    assert all(note.startswith(f"no effect here: {word} (") for note in notes) and len(notes) < 2
    return "noted" if notes else "silent"


def test_an_option_with_two_meanings_is_in_no_table():
    assert not [one.keys() & other.keys() for one, other in combinations(PROGRAMS.values(), 2) if one.keys() & other]
    assert "recompute_granularity" in TRAINING
    assert not (FOREIGN.keys() | ELSEWHERE.keys()) & TRAINING - ELSEWHERE.keys()


def test_an_option_is_silent_only_where_every_run_does_what_it_says():
    for name, fate in ((name, fate) for name, fate in FOREIGN.items() if name not in MODEL_FIELDS):
        for value in (fate.values or "").split("|") if fate.values is not None else ["1"]:
            outcome = fate_of(name, value)
            assert outcome == "noted" or (outcome == "silent" and (value in OFF or name in DONE)), f"{name} {value}"
            assert fate_of(name, value, dashes=True) == outcome
        assert fate_of(name, "something else") == ("noted" if fate.values is None else "refused")
        assert fate_of(name, "None") != "refused"  # a script's word for unset


def test_options_that_are_refused_for_one_reason_are_a_line():
    several = {f"<|token_{number}|>": "text" for number in range(16)} | {
        "fp8_format": "hybrid",
        "fp8_recipe": "delayed",
    }
    with pytest.raises(UserError) as refused:
        canonical_options(several, TRAINING)
    unknown, fp8 = refused.value.faults
    assert unknown.startswith("<|token_0|>, <|token_1|>, ") and " and 6 more: unknown options; --help" in unknown
    assert fp8.startswith("fp8_format: hybrid, fp8_recipe: delayed are not supported: ") and "FP8" in fp8


def test_what_is_done_anyway_is_in_a_table_and_done():
    assert DONE.keys() <= FOREIGN.keys() and float(FOREIGN["scale_loss"].values or 0) == LOSS_SCALE


@pytest.mark.parametrize(
    ("stated", "recomputes"),
    [
        ({"recompute_granularity": "full"}, True),  # Megatron-LM has no other switch
        ({"recompute_granularity": "full", "recompute": False}, False),  # as PaddleNLP's files have it
        ({"recompute_granularity": "full", "recompute": True}, True),
        ({"recompute": True}, True),
        ({"recompute": False}, False),
        ({"recompute_granularity": "full", "global_checkpoint": True}, True),
    ],
)
def test_a_granularity_alone_switches_recomputation_on(stated, recomputes):
    values = canonical_options({**stated, "global_train_batch_size": 2}, TRAINING)
    options = DegreeOptions.from_values(values).onto(UniformOptions.from_values(values), 1)
    assert options.global_checkpoint is recomputes


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        ({"recompute_granularity": "selective"}, "recompute_granularity: must be full: .* recompute_enc names parts"),
        ({"recompute_granularity": "core_attn"}, "recompute_granularity: must be full"),
        ({"recompute_granularity": "full", "global_checkpoint": False}, "global_checkpoint: is False, but"),
        ({"sharding_parallel_degree": 2}, "sharding_parallel_degree: needs a stage"),
    ],
)
def test_what_would_be_dropped_or_contradicts_is_refused(stated, fault):
    with pytest.raises(UserError, match=fault):
        DegreeOptions.from_values(stated).onto(UniformOptions.from_values(stated), 1)


def test_a_granularity_beside_a_plan_and_where_a_search_chooses_is_not_dropped(galvatron, tmp_path):
    plan = ["--model", "llama2-7b", "--world_size", "1", "--global_train_batch_size", "1", "--output", "plan.json"]
    assert galvatron("plan", "uniform", *plan).code == 0
    ran = galvatron("train", "plan.json", "--model", "llama2-7b", "--recompute-granularity", "full", "--dry_run")
    assert ran.code == 0 and "note: recompute_granularity ignored: the plan plan.json decides" in ran.out
    ran = galvatron("search", "llama2-7b", "--recompute_granularity", "full")
    assert ran.code == 2 and "the search chooses it; --disable_ckpt limits it" in ran.err
    ran = galvatron("train", "plan.json", "--model", "llama2-7b", "--eval-interval=2", "--eval-iters=1", "--dry_run")
    assert "eval_steps, max_evaluate_steps (nothing is evaluated without do_eval)" in ran.out
    assert galvatron("plan", "show", "plan.json", "--bf16").code == 2  # an option of fit alone


def test_planning_in_python_notes_what_has_no_effect():
    found = fit("qwen2.5-1.5b", gpus=1, bf16=True, worker=4)
    assert "note: no effect here: worker (a search takes one thread for about a second)" in found.printed
    with pytest.raises(UserError, match="fp16: True is not supported: its times are those of bf16"):
        fit("qwen2.5-1.5b", gpus=1, fp16=True)
