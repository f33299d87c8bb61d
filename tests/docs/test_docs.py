"""The documents are true: fields, commands and errors exist, and what the code makes is current."""

import ast
import json
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from paddlenlp_galvatron.cli.main import COMMANDS, commands
from paddlenlp_galvatron.model.families import FAMILIES
from paddlenlp_galvatron.plan import read_plan
from paddlenlp_galvatron.plan.fields import AssumedFields, GalvatronObject, StrategyFile
from paddlenlp_galvatron.training.step_log import StepRecord

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*/*.md"), *ROOT.glob("examples/*/*.md")]
PLAN_FILE = [ROOT / "docs" / language / "plan_file.md" for language in ("en", "zh")]


def test_both_languages_have_the_same_pages():
    pages = {language: {path.name for path in (ROOT / "docs" / language).glob("*.md")} for language in ("en", "zh")}
    assert pages["en"] == pages["zh"] and len(pages["en"]) <= 29
    for name, language in (("mkdocs.yml", "en"), ("mkdocs.zh.yml", "zh")):
        listed = re.findall(r"^ +- (\w+\.md)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
        index = (ROOT / "docs" / language / "index.md").read_text() + "](index.md)"
        assert sorted(listed) == sorted(pages["zh"]) and not [page for page in listed if f"]({page}" not in index]


@pytest.mark.parametrize(
    "part",
    ["commands", "profile_keys", *(pytest.param(part, marks=pytest.mark.slow) for part in ("accuracy", "parallelism"))],
)
def test_what_is_made_from_the_code_is_current(part, monkeypatch, capsys):
    """`make pages` writes it again."""
    monkeypatch.setattr(sys, "argv", ["pages", "--check", part])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "pages.py"), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_reference_of_python_has_every_field_and_no_other_method(language):
    for section in (ROOT / "docs" / language / "api.md").read_text().split("\n### ")[1:]:
        title, _, text = section.partition("\n")
        module, _, name = title.rpartition(".")
        if module.startswith("training"):
            pytest.importorskip("paddle")
        home = import_module(f"paddlenlp_galvatron.{module or 'api'}")
        owner = getattr(home, name, None) or getattr(import_module("paddlenlp_galvatron"), name)
        fields = [field for field in vars(owner).get("__annotations__", ()) if not field.startswith("_")]
        if isinstance(owner, type) and not issubclass(owner, Exception) and not module.startswith("training"):
            assert re.findall(r"^\| `(\w+)` \| `", text, re.MULTILINE) == fields, title
        for method in re.findall(r"^`\.(\w+)", text, re.MULTILINE):
            assert hasattr(owner, method), f"{title}.{method}"


@pytest.mark.slow
def test_the_site_is_built_strictly():
    """An environment of its own is made the first time."""
    ran = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for language in ("en", "zh"):
        assert (ROOT / "build" / "site" / language / "commands.html").exists()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path):
    for name in re.findall(r"\bgalvatron ([a-z]+(?:-[a-z]+)*)\b", path.read_text()):
        assert name in COMMANDS


@pytest.mark.parametrize("path", PLAN_FILE, ids=["en", "zh"])
def test_every_field_is_described(path):
    text = path.read_text()
    names = [*StrategyFile.model_fields, *(f"assumed.{name}" for name in AssumedFields.model_fields)]
    names += [name for name in GalvatronObject.model_fields if name != "assumed"]
    for name in names:
        assert f"`{name}`" in text or f'"{name}"' in text, name


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("command", "page"), [("convert", "convert"), ("data", "data"), ("gpu-check", "installation")])
def test_a_page_names_every_option_of_its_command(command, page, language):
    text = (ROOT / "docs" / language / f"{page}.md").read_text()
    own = [one for words, one in commands().items() if words.split()[0] == command]
    names = {name for one in own for name in one.options} - {"json"}  # which all have
    assert len(names) > 3 and not [name for name in names if not re.search(rf"(`|--){name}\b", text)]


def test_the_chinese_table_of_profile_keys_has_the_english_keys():
    tables = [(ROOT / "docs" / language / "files.md").read_text() for language in ("en", "zh")]
    english, chinese = (
        re.findall(r"^\|[^|]*\| `(.*?)(?<!\\)` \| .* \| [^|]* \|$", text, re.MULTILINE) for text in tables
    )
    assert english == chinese and len(english) > 20


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_fields_of_a_training_log_are_described(language):
    table = (ROOT / "docs" / language / "files.md").read_text().partition("## train_log.jsonl")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(StepRecord.__annotations__)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_support_matrix_is_the_codes(language):
    table = (ROOT / "docs" / language / "index.md").read_text().partition("\n## ")[2]
    rows = dict(re.findall(r"^\|.*`(\w+)`.*?\|(.*)\|$", table, re.MULTILINE))
    yes = {"en": "yes", "zh": "是"}[language]
    for name, family in FAMILIES.items():
        trained = [yes, yes, yes if family.mixture else "-", yes, yes, yes if family.stock else "-"]
        known = [yes, *(["-"] * 6 if family.untrained else trained)]
        assert [cell.strip() for cell in rows.pop(name).split("|")] == known, name
    assert not rows


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("examples/recipes/*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_has_the_plan_that_its_options_find(recipe, galvatron, tmp_path):
    ran = galvatron("search", "--config", recipe, "--output", "plan.json", "--json")
    shipped = read_plan(recipe.with_suffix(".json")).metadata["predicted"]["time_s"]
    assert ran.code == 0 and json.loads(ran.out.splitlines()[-1])["time_s"] == pytest.approx(shipped, rel=0.02)


ERRORS = ("UserError", "GalvatronError", "Infeasible")
SELF_REPORTED = re.compile(r"; |: X\W*$")


def reported_errors() -> dict[str, list[str]]:
    """The texts of each place where an error is made, with X for values."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "paddlenlp_galvatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS:
                texts = []
                for text in (one for one in ast.walk(node) if isinstance(one, ast.JoinedStr | ast.Constant)):
                    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                    texts.append("".join(str(one.value) if isinstance(one, ast.Constant) else "X" for one in parts))
                if any(re.search("[a-z_]{2}(: | [a-z])", text) for text in texts):  # else it passes on others' texts
                    found[f"{path.relative_to(ROOT)}:{node.lineno}"] = texts
    return found


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_error_stands_in_troubleshooting_and_nothing_else(language):
    """A row is a family of them, in the words of the code; some have more to say and stand above the table. Those that
    say themselves what to do, behind a semicolon, or end with the reason, need none."""
    *above, table = (ROOT / "docs" / language / "troubleshooting.md").read_text().split("\n## ")
    rows = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    headings = re.findall(r"`error: (.+?)`", "".join(above))
    plan_file = (ROOT / "docs" / language / "plan_file.md").read_text().split("\n## ")[-1]
    in_plan_file = re.findall(r"^\| `(.*?)` ?[^`|]*\|", plan_file, re.MULTILINE)

    def patterns(texts: list[str]) -> list[str]:
        return [re.escape(re.sub(r"\b[NM]\b", "…", text)).replace("…", ".*") for text in texts]

    errors = reported_errors()
    texts = [text for reported in errors.values() for text in reported]
    assert [row for row in patterns(rows) if not any(re.match(row, text, re.DOTALL) for text in texts)] == []
    known = patterns([*rows, *headings, *in_plan_file])
    missing = [
        (place, reported)
        for place, reported in errors.items()
        if not any(
            SELF_REPORTED.search(text) or any(re.match(row, text, re.DOTALL) for row in known) for text in reported
        )
    ]
    assert missing == []
