"""Hooks of MkDocs: resolve links of pages that are read in the repository, too, and take the marks off code blocks.

Pages of one language are one site; pictures are added to it. Other files of the repository are named, not linked.
A code block's mark says how tools/blocks.py checks it; Markdown knows one word behind the fence only.
"""

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

logging.getLogger("jieba").setLevel(logging.WARNING)  # which cuts Chinese words for the search, and says how

ROOT = Path(__file__).parents[1]
SHARED = ("images",)  # folders next to those of the languages
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)|(!\[[^\]]*\])\(([^)\s]+)\)")

MARK = re.compile(r"^(```\w+) \S+$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    for folder in SHARED:
        for path in sorted((ROOT / "docs" / folder).rglob("*.*")):
            where = path.relative_to(ROOT / "docs").as_posix()
            files.append(File(where, str(ROOT / "docs"), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = Path(config.docs_dir)

    def moved(found: re.Match[str]) -> str:
        text, target, picture, source = found.groups()
        if picture:
            return f"{picture}({site_link(here, source)})"
        link = site_link(here, target)
        return f"[{text}]({link})" if link else f"{text} (`{in_repository(here, target)}`)"

    return LINK.sub(moved, MARK.sub(r"\1", markdown))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    if "```" in html:
        raise PluginError(f"{page.file.src_path}: a code block is not read as one: write ```LANGUAGE [MARK]")
    return html


def site_link(here: Path, target: str) -> str:
    """Where a link of a page in the folder `here` leads on its site; empty for files that are no page of it."""
    path = target.partition("#")[0]
    if not path or "://" in path:
        return target
    place = (here / path).resolve()
    if place.is_relative_to(here):
        return target
    return place.relative_to(here.parent).as_posix() if place.relative_to(ROOT).parts[:2] == ("docs", *SHARED) else ""


def in_repository(here: Path, target: str) -> str:
    return (here / target.partition("#")[0]).resolve().relative_to(ROOT).as_posix()
