"""Possible contents of a disk after a loss of power, from a journal of a process's calls (`faulty_disk.c`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """One call that succeeded; `say` is the text written to stderr."""

    operation: str
    path: str
    path2: str
    offset: int
    data: bytes


def read_journal(path: Path) -> Iterator[Call]:
    with path.open("rb") as file:
        while head := file.readline():
            operation, length, name, name2, offset = head.decode().rstrip("\n").split("\t")
            yield Call(operation, name, name2, int(offset), file.read(int(length)))


@dataclass
class File:
    content: bytearray = field(default_factory=bytearray)
    kept: list[bytes] = field(default_factory=lambda: [b""])  # possible remains: as synced last, and every one since


@dataclass
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    kept: list[dict[str, File | Folder]] = field(default_factory=lambda: [{}])


Tree = dict[str, bytes | None]  # content of files, and None for folders, by path
ChooseFile, ChooseFolder = Callable[[File], bytes], Callable[[Folder], dict[str, File | Folder]]


class Disk:
    """A folder whose content and names are on disk only once they are synced."""

    def __init__(self, root: str):
        self._root, self._folder = root, Folder()

    def apply(self, call: Call) -> None:
        if call.operation == "say":
            return
        folder, name = self._find(call.path)
        node = folder.names.get(name) if name else folder
        if call.operation == "fsync":
            assert node is not None
            node.kept = [bytes(node.content) if isinstance(node, File) else dict(node.names)]
        elif call.operation in ("write", "truncate"):
            assert isinstance(node, File)
            stop = call.offset + len(call.data)
            node.content[call.offset : stop if call.operation == "write" else None] = call.data
            node.kept.append(bytes(node.content))
        else:
            if call.operation == "rename":
                other, new = self._find(call.path2)
                assert other is folder, "within one folder"
                folder.names[new] = folder.names.pop(name)
            elif call.operation in ("unlink", "rmdir"):
                del folder.names[name]
            else:
                folder.names[name] = File() if call.operation == "create" else Folder()
            folder.kept.append(dict(folder.names))

    def after_a_kill(self) -> Tree:
        """All calls took effect."""
        return self._tree(lambda file: bytes(file.content), lambda folder: folder.names)

    def after_a_loss_of_power(self, chance: random.Random) -> Iterator[Tree]:
        """With all unsynced content gone; with names alone, their content empty or NULs; with content alone; and
        with any of it."""

        def nuls(file: File) -> bytes:
            return file.kept[0].ljust(len(file.content), b"\0")

        yield self._tree(lambda file: file.kept[0], lambda folder: folder.kept[0])
        yield self._tree(lambda file: file.kept[0], lambda folder: folder.names)
        yield self._tree(nuls, lambda folder: folder.names)
        yield self._tree(lambda file: bytes(file.content), lambda folder: folder.kept[0])
        for _ in range(3):
            yield self._tree(lambda file: chance.choice(file.kept), lambda folder: chance.choice(folder.kept))

    def _find(self, path: str) -> tuple[Folder, str]:
        folder, steps = self._folder, path.removeprefix(self._root).strip("/").split("/")
        for step in steps[:-1]:
            inner = folder.names[step]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, steps[-1]

    def _tree(self, content: ChooseFile, names: ChooseFolder) -> Tree:
        tree: Tree = {}

        def walk(folder: Folder, path: str) -> None:
            for name, node in names(folder).items():
                tree[f"{path}{name}"] = content(node) if isinstance(node, File) else None
                if isinstance(node, Folder):
                    walk(node, f"{path}{name}/")

        walk(self._folder, "")
        return tree


def lay_out(tree: Tree, folder: Path) -> None:
    """Make a disk's content again."""
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
