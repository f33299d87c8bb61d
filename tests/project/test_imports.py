"""The graph of the package's imports, also of those inside functions and for types alone: it has no circle."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from inspect import isfunction, ismodule
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "paddlenlp_galvatron"
Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / PACKAGE).rglob("*.py"))
    return {".".join(path.parts).removesuffix(".__init__"): ROOT / path.with_suffix(".py") for path in paths}


def imported(module: str, source: str, is_package: bool, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a module's source imports. `from . import a` imports a, where that is one."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for name in node.names:
                found = next((one for one in (f"{base}.{name.name}", base) if one in known), module)
                if found != module:
                    yield found


def graph() -> Graph:
    known = modules()
    return {
        module: set(imported(module, path.read_text(), path.name == "__init__.py", known))
        for module, path in known.items()
    }


def by_package(between: Graph) -> Graph:
    """The arrows between packages, files next to them being packages of their own."""

    def package(module: str) -> str:
        return ".".join(module.split(".")[:2])

    arrows: Graph = {}
    for module, found in between.items():
        arrows.setdefault(package(module), set()).update({package(one) for one in found} - {package(module)})
    return arrows


def require_no_circle(between: Graph) -> None:
    """Raises CycleError, which lists the circle."""
    TopologicalSorter(between).prepare()


def test_no_module_imports_itself_through_others():
    between = graph()
    assert "paddlenlp_galvatron.planner.engine" in between["paddlenlp_galvatron.planner"]
    require_no_circle(between)


def test_launch_imports_base_alone():
    assert by_package(graph())[f"{PACKAGE}.launch"] == {f"{PACKAGE}.base"}


def test_report_takes_records_and_constants_of_the_planner_and_no_function():
    """A command calls the planner's functions; report renders their answers."""
    for path in (ROOT / PACKAGE / "report").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("planner"):
                module = import_module(f"{PACKAGE}.{node.module}")
                taken = {name.name: getattr(module, name.name) for name in node.names}
                assert not [name for name, value in taken.items() if isfunction(value) or ismodule(value)], path
