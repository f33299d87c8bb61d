"""A file of options, YAML or JSON, for commands that have many."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.reading import read_json
from paddlenlp_galvatron.plan import UserError


def read_options(path: Path) -> dict[str, Any]:
    """Options by the names in the file, those in sections beside the rest. Raises UserError.

    A section is an object under a name of its own, such as SearchEngineArgs; it is for the eye alone.
    """
    content = read_json(path) if path.suffix == ".json" else _read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no options; write one a line, as memory_constraint: 36")
    result: dict[str, Any] = {}
    for name, value in content.items():
        for key, inner in value.items() if isinstance(value, dict) else [(name, value)]:
            if not isinstance(key, str):
                raise UserError(f"{path}: {key!r} is no name of an option")
            if key in result:
                raise UserError(f"{path}: {key} stands there twice; keep one")
            result[key] = inner
    return result


def _read_yaml(path: Path) -> Any:
    import yaml  # here, as only a file needs it

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses what YAML forbids and PyYAML lets pass: a name that stands twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for name in names:
                if names.count(name) > 1:
                    raise UserError(f"{path}: {name} stands there twice; keep one")
            return dict(super().construct_mapping(node, deep))

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}: not valid YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {error or 'nested too deeply'}") from None
