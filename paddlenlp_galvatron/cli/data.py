"""`galvatron data`: turn text into what training reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.limits import Count, Trained
from paddlenlp_galvatron.base.printing import Bars
from paddlenlp_galvatron.base.text import near

from .conventions import App, Json, answer, within

if TYPE_CHECKING:
    from paddlenlp_galvatron.training.data.corpus import Corpus, Document

app = App(help="Turn text into what training reads.")
TRAIN = "train"
MIB = 2**20
TRAINING_BYTES = 64 << 20  # text a tokenizer is trained on: more changes few of its merges


@app.callback()
def data() -> None:
    """Turn text into what training reads."""


@app.command()
def prepare(
    output: Annotated[Path, typer.Option(help="path of the data set, without .bin and .idx")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="files or folders", metavar="PATH...")] = None,
    input: Annotated[list[Path] | None, typer.Option(help="files or folders, given as an option instead")] = None,
    standard_library: Annotated[
        bool, typer.Option(help="use the source code of Python's standard library as text")
    ] = False,
    tokenizer: Annotated[str, typer.Option(help='a tokenizer.json, its folder, or "train" to make one')] = TRAIN,
    vocab_size: Annotated[
        int, typer.Option(parser=within(Trained), help="vocabulary size of the tokenizer that is trained")
    ] = 32000,
    end_token: Annotated[
        str | None,
        typer.Option(help="token that ends a document; unset: <|endoftext|>, <|end_of_text|> or </s> of the tokenizer"),
    ] = None,
    text_key: Annotated[str, typer.Option(help="field of a JSON line that holds the text")] = "text",
    limit_mib: Annotated[
        int | None,
        typer.Option(
            parser=within(Count), help="amount of text to read, MiB; the document that reaches it is the last"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokenise text and JSON lines into a Megatron-compatible data set, OUTPUT.bin and OUTPUT.idx.

    A trained tokenizer is written beside it as tokenizer.json.
    """
    from paddlenlp_galvatron.training.data import corpus
    from paddlenlp_galvatron.training.data import tokenizer as tokenizers

    from ..training.data.dataset import dataset_files

    begin = time.monotonic()
    paths = [*(input or []), *(inputs or [])]
    if bool(paths) == standard_library:
        raise UserError("input: missing; name files or folders that hold text, or give --standard_library")
    dataset_files(output)  # a name that cannot be is told at once
    files = corpus.standard_library() if standard_library else corpus.find_files(paths)
    text = corpus.Corpus(files, text_key, limit_mib * MIB if limit_mib else None)
    with Bars(in_bytes=True) as progress:
        if tokenizer == TRAIN:
            sample = replace(text, limit_bytes=min(text.size_bytes, TRAINING_BYTES))
            watched = _watch(sample, progress, "training the tokenizer")
            used = tokenizers.train_tokenizer((document.text for document in watched), vocab_size)
        else:
            used = tokenizers.load_tokenizer(tokenizer)
        end = tokenizers.end_token(used, end_token)
        watched = _watch(text, progress, "tokenising")
        new_tokenizer = output.parent / "tokenizer.json" if tokenizer == TRAIN else None
        written = corpus.write_dataset(watched, output, used, end, new_tokenizer)
    seconds, size = time.monotonic() - begin, used.get_vocab_size()
    answer(
        f"{near(output)}.bin and .idx: {written.documents} documents, {written.tokens} tokens of a vocabulary of "
        f"{size}, in {seconds:.1f} s",
        as_json,
        data=output,
        documents=written.documents,
        tokens=written.tokens,
        vocab_size=size,
        seconds=round(seconds, 2),
    )


def _watch(text: Corpus, progress: Bars, what: str) -> Iterator[Document]:
    """Documents, with progress."""
    task = progress.add_task(what, total=text.size_bytes)
    for document in text:
        yield document
        progress.advance(task, document.size_bytes)
