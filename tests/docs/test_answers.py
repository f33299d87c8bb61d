"""The documentation answers users' questions, in both languages: by name, and in lists made from the code."""

import ast
import re
from pathlib import Path

import pytest

from paddlenlp_galvatron.cli.command import EXIT_CODES
from paddlenlp_galvatron.cli.main import COMMANDS, commands
from paddlenlp_galvatron.model.families import FAMILIES
from paddlenlp_galvatron.options.aliases import canonical_name
from paddlenlp_galvatron.options.foreign import outcome_of
from paddlenlp_galvatron.training.paddlenlp.arguments import OPTIONS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "paddlenlp_galvatron"
# Words of the five guides of Galvatron and its port that a user searches -> the page that says what they do here.
ANSWERS = {
    "profile": [
        *("profile_allreduce.sh", "profile_p2p.sh", "profile_allreduce_sp.sh", "profile_all2all.sh"),
        *("profile_overlap.sh", "`launch`", "`static`", "`batch`", "`sequence`", "profile_batch_size_step"),
    ],
    "search": ["`bsz_scale` ", "`sp_space tp+sp`", "`--no_global_memory_buffer`", "files.md#"],
    "files": ["1.1", "`--overlap_coe_path`", "`--output_config_path`"],
    "checkpoints": ["`--save DIR --save-interval N`", "`--initialize_on_meta 1`", "--load_distributed`"],
    "train": ["`--set_seqlen_manually 1`", "`--no_async_grad_reduce`", "`--galvatron_config_path None`"],
    "plan_file": ["`// …`"],
    "installation": ["galvatron_dp_core.cpython-311-x86_64-linux-gnu.so"],
    "from_galvatron": ["`bsz_scale`", "`tp_consec 0`", "`launch`", "`no_global_memory_buffer`", "`save-interval`"],
}
# Families whose name in prose is not their word.
MODELS = {
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
}
LISTING_MODELS = ("index", "train", "convert", "from_paddlenlp", "from_galvatron")
# Files that a command makes for its own processes, or reads as others made them.
INNER = {"check/parity", "check/validation/work", "check/gpu/faults", "check/gpu/kernels", "check/gpu/stock"}
INNER |= {"check/gpu/waits", "training/data/special_tokens", "training/checkpoint/companions"}
INNER |= {"training/checkpoint/adapters", "training/checkpoint/weight_files", "training/data/templates"}
INNER |= {"cli/what_if", "api"}
LANGUAGES = pytest.mark.parametrize("language", ["en", "zh"])


def page(language: str, name: str) -> str:
    return (ROOT / "docs" / language / f"{name}.md").read_text()


@LANGUAGES
@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_guides_name_is_answered_in_prose(name, language):
    text = page(language, name)
    assert [word for word in ANSWERS[name] if word not in text] == []


@LANGUAGES
@pytest.mark.parametrize("name", LISTING_MODELS)
def test_every_family_that_is_trained_is_named(name, language):
    text = page(language, name)
    names = {MODELS.get(family, family.capitalize()) for family in FAMILIES}
    assert len(names) == len(FAMILIES) and [one for one in sorted(names) if one not in text] == []


@LANGUAGES
def test_every_command_and_exit_code_is_on_the_cheat_sheet(language):
    text = page(language, "quickstart")
    codes = re.findall(r"(\d+) ", EXIT_CODES)
    for reported in (text, page(language, "troubleshooting")):
        assert len(codes) == 7 and [code for code in codes if not re.search(rf"\b{code}\b", reported)] == []
    assert [name for name in COMMANDS if f"galvatron {name}" not in text] == []
    assert [name for name in commands() if not re.search(rf"\b{name.split()[-1]}\b", text)] == []


def test_the_help_names_every_command_of_a_group():
    grouped = [name.split() for name in commands() if " " in name]
    assert [(group, name) for group, name in grouped if name not in COMMANDS[group].partition(":")[2]] == []


@LANGUAGES
def test_arguments_of_paddlenlp_have_the_fate_that_the_page_says(language):
    """A row of the table of fine-tuning that refuses, notes or takes: each of its names."""
    table = page(language, "from_paddlenlp").partition("\n## ")[2].partition("\n## ")[2]
    for names, fate in re.findall(r"^\| (`.*?) \| (.*) \|$", table.partition("\n## ")[0], re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            outcome, own = outcome_of(name, "1"), canonical_name(name) in OPTIONS
            if re.match("the same|相同", fate):
                assert own, name
            elif re.match("a note|提示", fate):
                assert outcome and outcome.idle, name
            elif re.match("true is refused|为 true 时拒绝", fate):
                assert outcome and outcome.fault, name


def written_files() -> set[str]:
    """Names of JSON files and pages in the code, without those of commands' inner processes."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        place = str(path.relative_to(PACKAGE).with_suffix(""))
        if not any(place == inner or place.startswith(f"{inner}/") for inner in INNER):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= set(re.findall(r"^\w{3,}\.(?:json|jsonl|html|tar\.gz)$", node.value))
    return found | {".galvatron-index", ".journal", ".lock", ".part"}


@LANGUAGES
def test_every_file_that_is_left_is_listed(language):
    text = page(language, "files")
    names = written_files()
    assert {"train_log.jsonl", "best.json", "node.json"} <= names
    assert sorted(name for name in names if name not in text and name not in ("gpus_per_node.json",)) == []
