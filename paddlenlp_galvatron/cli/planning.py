"""Helpers of planning commands: document lengths of a data set, and progress of searches."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.printing import Bars, say
from paddlenlp_galvatron.options.prices import LengthOptions
from paddlenlp_galvatron.planner.branch_and_bound import SearchState, Watch


def with_lengths(
    values: Mapping[str, Any], seq_length: int, vocab_size: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The options, with `document_tokens` and `tokens` from the data set that they name; `say` receives how full its
    rows are.

    Raises UserError."""
    args = LengthOptions.from_values(values)
    if args.dataset_name_or_path is None:
        return dict(values)
    model, pairs = Path(str(values.get("model_size"))), values.get("task") == "dpo"
    if not model.is_dir():
        raise UserError("dataset_name_or_path: its lengths need a tokenizer; name the model by its folder")
    from paddlenlp_galvatron.training.data.tuning import RowLayout, TuningData

    packing = "in_order" if pairs and args.packing == "none" else args.packing
    try:
        layout = RowLayout(seq_length, vocab_size, packing=packing, pairs=pairs, keep=False)
        data = TuningData(args.dataset_name_or_path, model, layout, 1)
    except UserError as error:
        raise UserError(f"{fault}; or give --document_tokens" for fault in error.faults) from None
    lengths = data.lengths
    say(
        f"{args.dataset_name_or_path}: {data.samples} rows, filled to {lengths.filled:.1%}; {lengths.learnt:.1%} of "
        f"their tokens are learnt; a token's document has {lengths.document_tokens:,.0f} tokens"
    )
    measured = {"document_tokens": lengths.document_tokens, "tokens": float(data.samples * seq_length)}
    return measured | dict(values)


LONG_S = 2.0


@contextmanager
def watched(note: str = "") -> Iterator[Watch]:
    """Shows the state of long searches on stderr; `note` is shown once with it."""
    with _shown(note) as show:
        yield lambda state: show("searching", state)


@contextmanager
def each_watched() -> Iterator[Callable[[], Watch]]:
    """Watchers of numbered searches that run one after the other."""
    numbers = count(1)

    def begin() -> Watch:
        number = next(numbers)
        return lambda state: show(f"search {number}", state)

    with _shown() as show:
        yield begin


@contextmanager
def _shown(note: str = "") -> Iterator[Callable[[str, SearchState], None]]:
    begin, notes = time.monotonic(), [note] if note else []
    with Bars() as bars:
        task = bars.add_task("", total=None, visible=False)

        def show(what: str, state: SearchState) -> None:
            if time.monotonic() > begin + LONG_S:
                while notes:
                    say(notes.pop(), err=True)
                words = f"{what}: {_words(state)}"
                bars.update(task, visible=True, completed=state.done, total=state.families, description=words)

        yield show


def _words(state: SearchState) -> str:
    best = f"{state.best:.4g} samples/s" if state.best else "no plan yet"
    return f"{best}, at most {state.limit:.4g}"
