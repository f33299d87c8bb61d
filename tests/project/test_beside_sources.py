"""`pip install -e .` next to a PaddleNLP that is installed editable from its own sources, as its developers have it."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from small_model import MODEL as SMALL

from paddlenlp_galvatron.training.step_log import read_log

paddlenlp = pytest.importorskip("paddlenlp")

ROOT = Path(__file__).parents[2]
OURS = ("paddlenlp", "galvatron_dp_core", "_editable", "__editable__")  # how names of newly installed packages begin
TIMEOUT_S = 600.0
SETUP = """
from setuptools import find_packages, setup

setup(name="paddlenlp", version="{version}", packages=find_packages(exclude=("llm*",)))
"""
MODEL = SMALL | {"model_type": "qwen2", "num_key_value_heads": 4}


def run(*words: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@pytest.fixture
def environment(tmp_path) -> Path:
    """The Python of an environment that has every package but the two, without a network."""
    others = tmp_path / "packages"
    others.mkdir()
    for folder in [Path(path) for path in sys.path if path.endswith("site-packages")]:
        for entry in folder.iterdir():
            link = others / entry.name
            if not entry.name.startswith(OURS) and entry.suffix != ".pth" and not link.exists():
                link.symlink_to(entry)
    venv.create(tmp_path / "venv", with_pip=False)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{others}\n")
    return tmp_path / "venv" / "bin" / "python"


def sources_of_paddlenlp(folder: Path) -> Path:
    """A checkout of PaddleNLP as far as it is in its wheel, with the project's scripts copied in."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(paddlenlp.__file__).parent, folder / "paddlenlp", ignore=ignored)
    (folder / "setup.py").write_text(SETUP.format(version=importlib.metadata.version("paddlenlp")))
    scripts = folder / "llm" / "auto_parallel" / "galvatron"
    shutil.copytree(ROOT / "llm" / "auto_parallel" / "galvatron", scripts, ignore=ignored)
    return folder


def sources_of_ours(folder: Path) -> Path:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
def test_both_are_installed_editable_and_train(environment, tmp_path):
    stock, ours = sources_of_paddlenlp(tmp_path / "PaddleNLP"), sources_of_ours(tmp_path / "paddlenlp_galvatron")
    install = (sys.executable, "-m", "pip", "--python", environment, "install", "--no-index", "--no-deps")
    for folder in (stock, ours):
        run(*install, "--no-build-isolation", "--quiet", "-e", ".", cwd=folder)
    stated = run(
        environment,
        "-W",
        "ignore",
        "-c",
        "import paddlenlp, paddlenlp_galvatron.register, galvatron_dp_core\n"
        "from paddlenlp.trainer import GalvatronTrainer\n"
        "print(paddlenlp.__file__, paddlenlp_galvatron.__file__, GalvatronTrainer.__name__)",
        cwd=tmp_path,
    )
    expected = [str(stock / "paddlenlp" / "__init__.py"), str(ours / "paddlenlp_galvatron" / "__init__.py")]
    assert stated.split()[-3:] == [*expected, "GalvatronTrainer"]
    scripts = stock / "llm" / "auto_parallel" / "galvatron"
    (scripts / "model.json").write_text(json.dumps(MODEL))
    words = "--model model.json --nproc 2 --seq_length 16 --global_train_batch_size 4 --max_steps 2 --timeout 120"
    words += " --input_dir random"
    run(environment, "run_pretrain_galvatron.py", *words.split(), "--output_dir", tmp_path / "run", cwd=scripts)
    assert len(read_log(tmp_path / "run" / "train_log.jsonl")) == 2
