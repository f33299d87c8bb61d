"""`galvatron data`: turn text into training data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_galvatron.base import MIB, UserError, near
from paddlenlp_galvatron.base.limits import Count, Trained
from paddlenlp_galvatron.base.printing import Bars
from paddlenlp_galvatron.options.group import Options, Paths

from .command import App, answer, say_note

if TYPE_CHECKING:
    from paddlenlp_galvatron.training.data.corpus import Corpus, Document

app = App("Turn text into training data.")
TRAIN = "train"
MOST_NAMED = 20  # skipped files that the summary names
TRAINING_BYTES = 64 << 20  # text to train a tokenizer on: more text changes few of its merges


class PrepareOptions(Options):
    """Options: source text and output data set."""

    input: Paths = ()
    output: Path
    standard_library: bool = False
    tokenizer: str = TRAIN
    vocab_size: Trained = 32000
    end_token: str | None = None
    text_key: str = "text"
    encoding: str = "utf-8"
    limit_mib: Count | None = None


@app.command(PrepareOptions, positional={"input": "PATH..."})
def prepare(values: dict[str, Any], json: bool) -> None:
    """Tokenise text and JSON lines into a Megatron-compatible data set, OUTPUT.bin and OUTPUT.idx.

    A trained tokenizer is written next to it as tokenizer.json.
    """
    args = PrepareOptions.from_values(values)
    from paddlenlp_galvatron.training.data import corpus
    from paddlenlp_galvatron.training.data import tokenizer as tokenizers
    from paddlenlp_galvatron.training.data.dataset import dataset_files
    from paddlenlp_galvatron.training.data.text_files import require_encoding
    from paddlenlp_galvatron.training.data.tokenizer import end_of_text

    begin = time.monotonic()
    output = args.output
    if bool(args.input) == args.standard_library:
        raise UserError("input: missing; name files or folders that hold text, or give --standard_library")
    dataset_files(output)  # an impossible name is refused at once
    require_encoding(args.encoding)
    stdlib = args.standard_library
    files = (
        corpus.CorpusFiles(corpus.standard_library(), {}) if stdlib else corpus.find_files(args.input, args.encoding)
    )
    limit = args.limit_mib * MIB if args.limit_mib else None
    text = corpus.Corpus(files.files, args.text_key, limit, args.encoding)
    with Bars(in_bytes=True) as progress:
        if args.tokenizer == TRAIN:
            sample = replace(text, limit_bytes=min(limit or TRAINING_BYTES, TRAINING_BYTES))
            watched = _watch(sample, progress, "training the tokenizer")
            used = tokenizers.train_tokenizer((document.text for document in watched), args.vocab_size)
            end = end_of_text(used, text=tokenizers.END_OF_TEXT if args.end_token is None else args.end_token)
        else:
            used = tokenizers.load_tokenizer(args.tokenizer)
            end = end_of_text(used, Path(args.tokenizer), args.end_token)
        if end.note:
            say_note(end.note)
        watched = _watch(text, progress, "tokenising")
        new_tokenizer = output.parent / "tokenizer.json" if args.tokenizer == TRAIN else None
        written = corpus.write_dataset(watched, output, used, end.token, new_tokenizer)
    seconds, size = time.monotonic() - begin, used.get_vocab_size()
    left_out = {str(file): reason for file, reason in files.left_out.items()}
    lines = [
        f"{near(output)}.bin and .idx: {written.documents} documents, {written.tokens} tokens of a vocabulary of "
        f"{size}, each ended by {end.text} ({end.token}), in {seconds:.1f} s",
        *(f"skipped: {file}: {reason}" for file, reason in islice(left_out.items(), MOST_NAMED)),
    ]
    if len(left_out) > MOST_NAMED:
        lines.append(f"skipped: {len(left_out) - MOST_NAMED} more; --json names them all")
    answer(
        "\n".join(lines),
        json,
        data=output,
        left_out=left_out,
        documents=written.documents,
        tokens=written.tokens,
        vocab_size=size,
        end_token=end.text,
        end_token_id=end.token,
        seconds=round(seconds, 2),
    )


def _watch(text: Corpus, progress: Bars, what: str) -> Iterator[Document]:
    """Documents, with progress."""
    task = progress.add_task(what, total=text.size_bytes)
    for document in text:
        yield document
        progress.advance(task, document.size_bytes)
