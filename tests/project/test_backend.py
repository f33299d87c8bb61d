"""One file knows what the CPU backend lacks; everything else makes the same calls with any backend."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "paddlenlp_galvatron"
KNOWS = ROOT / "runtime" / "cpu_backend.py"
# Ways to ask Paddle, or its environment, which backend runs.
QUESTIONS = {"get_backend", "ProcessGroupGloo", "ProcessGroupNCCL", "is_compiled_with_nccl", "_default_backend"}
BACKENDS = {"gloo", "nccl"}
# The launcher sets Paddle's backend where there is no GPU, and does not ask for it.
SETS = {ROOT / "runtime" / "launch.py": {"gloo"}}


def named(tree: ast.AST) -> set[str]:
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def words(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_nothing_but_the_cpu_backend_asks_which_backend_runs():
    files = [path for package in ("runtime", "training") for path in (ROOT / package).rglob("*.py")]
    asking = {}
    for path in set(files) - {KNOWS}:
        tree = ast.parse(path.read_text())
        found = named(tree) & QUESTIONS | words(tree) & BACKENDS - SETS.get(path, set())
        if found:
            asking[str(path)] = found
    assert not asking
    assert named(ast.parse(KNOWS.read_text())) & QUESTIONS, "the list of questions knows none that is asked"
