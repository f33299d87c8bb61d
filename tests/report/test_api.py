"""Planning in Python: `import paddlenlp_galvatron as galvatron`."""

import ast
import json
import pydoc
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import paddlenlp_galvatron as galvatron
from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.main import commands
from paddlenlp_galvatron.cli.search import AnswerOptions

ROOT = Path(__file__).parents[2]
ASKED = {"device": "h100-80gb", "gpus": 8, "batch": 64}


def test_fit_and_search_agree_and_show_themselves_shortly_and_in_a_notebook():
    fits, found = galvatron.fit("qwen2.5-7b", **ASKED), galvatron.search("qwen2.5-7b", **ASKED)
    assert fits.rows[0]["step_s"] == pytest.approx(found.result.require().time_s)
    assert fits.plans[8].strategy.world_size == found.plan.strategy.world_size == 8
    for answer in (fits, found, found.plan):
        assert len(repr(answer)) < 200 and "\n" not in repr(answer)
        assert answer._repr_html_().startswith("<pre") and "zero" in answer._repr_html_()


def test_a_plan_is_saved_loaded_shown_and_explained(tmp_path, capsys):
    found = galvatron.search("qwen2.5-0.5b", **ASKED)
    found.plan.save(tmp_path / "plan.json")
    plan = galvatron.PlanFile.load(tmp_path / "plan.json")
    plan.show()
    assert "8 in 1 stage of 8" in capsys.readouterr().out
    reported = galvatron.explain(plan)
    assert reported.summary["time_s"] == pytest.approx(found.result.require().time_s)
    assert "what if" in reported._repr_html_() and "\n" not in repr(reported)


@pytest.mark.parametrize("name", ["fit", "search", "explain"])
def test_the_help_lists_every_option_with_its_default(name):
    reported = pydoc.plain(pydoc.render_doc(getattr(galvatron, name)))
    options = commands()[name].options.keys() - {"json", "list", "config", "dataset_name_or_path", "packing"}
    options -= AnswerOptions.model_fields.keys()  # of files: in Python a plan is saved
    assert [option for option in options if f"\n        {option}" not in reported] == []
    assert len(reported.splitlines()) < 110
    if name == "search":
        assert "global batch size" in reported and "fine_grained_mode = True: " in reported


def test_errors_are_in_the_package():
    with pytest.raises(galvatron.UserError, match="nowhere"):
        galvatron.search("nowhere")
    with pytest.raises(galvatron.Infeasible, match="no plan fits"):
        _ = galvatron.search("llama3-405b", **ASKED).plan
    assert issubclass(galvatron.Infeasible, galvatron.GalvatronError)


def test_a_mistake_names_the_option():
    with pytest.raises(UserError, match="mdoel: unknown option; did you mean model"):
        galvatron.fit("qwen2.5-7b", mdoel="x")
    nothing = galvatron.search("llama3-405b", **ASKED)
    assert "the smallest plan needs" in repr(nothing)
    with pytest.raises(AttributeError):
        galvatron.nothing  # noqa: B018


def test_the_package_loads_nothing_until_asked_and_is_a_command_of_its_own():
    program = (
        "import sys, paddlenlp_galvatron as g; dir(g); print([n for n in ('numpy', 'pydantic') if n in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "[]\n"
    ran = subprocess.run([sys.executable, "-m", "paddlenlp_galvatron", "--version"], capture_output=True, timeout=300)
    assert (ran.returncode, ran.stdout.decode()) == (0, f"galvatron {galvatron.__version__}\n")


def test_types_are_shipped_and_planning_leaves_numpy_2_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (ROOT / "paddlenlp_galvatron" / "py.typed").exists() and "Typing :: Typed" in project["classifiers"]
    (numpy,) = (line for line in project["dependencies"] if line.startswith("numpy"))
    assert "<" not in numpy and "numpy<2" in project["optional-dependencies"]["gpu"]


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Each cell, without Jupyter; a cell's last line is shown there, so it has a table."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "plan.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = ast.Expression(tree.body.pop().value)
            exec(compile(tree, "cell", "exec"), names)
            shown.append(eval(compile(last, "cell", "eval"), names)._repr_html_())
    assert len(shown) == 5 and all("qwen" in one or "stage" in one for one in shown)
    assert (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_planning_works_with_numpy_2(tmp_path):
    """Installed by itself in a new environment, where Paddle is not."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    install = [python, "-m", "pip", "install", "--quiet", str(ROOT), "numpy>=2"]
    if (ran := subprocess.run(install, capture_output=True, text=True, timeout=900)).returncode:
        pytest.skip(f"packages cannot be had here: {ran.stderr[-200:]}")
    asked = f"import numpy, paddlenlp_galvatron as g; print(numpy.__version__, g.search('qwen2.5-0.5b', **{ASKED}))"
    ran = subprocess.run([python, "-c", asked], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.stdout.startswith("2.") and "s a step" in ran.stdout, ran.stdout + ran.stderr
