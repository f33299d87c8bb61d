"""Hooks of MkDocs: resolve links of pages that are read in the repository, too.

Pages of one language are one site. Pictures and the English pages that stand in the root are added to it.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

logging.getLogger("jieba").setLevel(logging.WARNING)  # which cuts Chinese words for the search, and says how

ROOT = Path(__file__).parents[1]
SHARED = ("images",)  # folders next to those of the languages
IN_ROOT = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
HOMES = {"README.md": "index.md", "README_zh.md": "index.md"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)|(!\[[^\]]*\])\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    for folder in SHARED:
        for path in sorted((ROOT / "docs" / folder).rglob("*")):
            if path.is_file():
                where = path.relative_to(ROOT / "docs").as_posix()
                files.append(File(where, str(ROOT / "docs"), config.site_dir, config.use_directory_urls))
    if language(config) == "en":
        for name, page in IN_ROOT.items():
            files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = ROOT if page.file.src_uri in IN_ROOT.values() and language(config) == "en" else Path(config.docs_dir)

    def moved(found: re.Match[str]) -> str:
        text, target, picture, source = found.groups()
        if picture:
            return f"{picture}({site_link(here, source, config)})"
        if ":" not in target and (here / target.partition("#")[0]).resolve().is_relative_to(ROOT / "benchmarks"):
            return f"{text} (`{target.partition('#')[0].removeprefix('../../')}`)"  # it is no page of the site
        link = site_link(here, target, config)
        # MkDocs checks what Markdown makes of a link; the other language is another site, which it doesn't know.
        return f'<a href="{link}">{text}</a>' if link.startswith("../") else f"[{text}]({link})"

    return LINK.sub(moved, markdown)


def site_link(here: Path, target: str, config: Any) -> str:
    """Where a link of a page in the folder `here` leads on the site of this language."""
    path, hash_, anchor = target.partition("#")
    if not path or "://" in path:
        return target
    place = (here / path).resolve().relative_to(ROOT)
    own = language(config)
    if place.name in HOMES and len(place.parts) == 1:
        return HOMES[place.name] if (place.name == "README.md") == (own == "en") else "../" + other(own) + "/index.html"
    if place.name in IN_ROOT and len(place.parts) == 1:
        page = IN_ROOT[place.name]
        return f"{page}{hash_}{anchor}" if own == "en" else f"../en/{Path(page).stem}.html{hash_}{anchor}"
    if place.parts[0] == "docs" and place.parts[1] in SHARED:
        return "/".join(place.parts[1:])
    if place.parts[0] == "docs" and place.parts[1] == own:
        return f"{'/'.join(place.parts[2:])}{hash_}{anchor}"
    if place.parts[0] == "docs" and place.parts[1] == other(own):
        return f"../{other(own)}/{Path(*place.parts[2:]).stem}.html{hash_}{anchor}"
    return target  # MkDocs says that it leads nowhere


def language(config: Any) -> str:
    return Path(config.docs_dir).name


def other(own: str) -> str:
    return "zh" if own == "en" else "en"
