"""Opens the data of a run, prefetches each step's rows, and checks whether a checkpoint can be resumed: whether it has
the run's model, adapters and data.

The check runs before ranks start, which takes half a minute, and again on the ranks, which also read the checkpoint's
files. Nothing here imports PaddleNLP.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import UserError
from ..model.fields import USUAL
from ..model.lora import Adapters
from ..plan import ModelShape, Plan
from .checkpoint.stored import BrokenCheckpoint, Checkpoint, open_checkpoint, whole_checkpoints
from .data.dataset import Split
from .data.source import BatchSource, RandomData, TrainingData
from .data.tuning import RowLayout, TuningData
from .settings import RANDOM, TrainSettings

T = TypeVar("T")
Sources = list[tuple[str, BatchSource]]  # evaluation data; with names if there are several


def open_data(
    settings: TrainSettings,
    plan: Plan,
    shape: ModelShape,
    split: Split = "train",
    on_identity: Callable[[dict[str, Any]], object] = lambda identity: None,
    keep: bool = True,
) -> BatchSource:
    """A split of a run's data, in global batches. `on_identity` gets their identity as soon as it is computed;
    without `keep`, nothing is written next to the data. Raises UserError."""
    seq_length = plan.assumed.seq_length or 0
    pairs = settings.preference is not None
    data = settings.dataset_name_or_path or settings.train_dataset_path
    if split == "valid" and data is not None and data.is_file():
        if settings.dev_dataset_path is None:
            raise UserError(f"dev_dataset_path: missing; {data} is trained on, so name evaluation data")
        data = settings.dev_dataset_path
    if data is not None:
        layout = RowLayout(
            seq_length,
            shape.vocab_size,
            settings.max_prompt_len if pairs else settings.src_length,
            settings.chat_template,
            settings.autoregressive,
            settings.effective_packing,
            pairs,
            keep,
        )
        tokenizer = settings.tokenizer_name_or_path or Path(settings.model)
        return TuningData(data, tokenizer, layout, plan.global_batch, split, on_identity)
    opened: BatchSource
    common = seq_length, plan.global_batch, settings.seed, split
    if settings.input_dir is None:
        raise UserError(
            f"input_dir: missing; name the data to train on, or say --input_dir {RANDOM} to try a plan on random tokens"
        )
    if settings.input_dir == RANDOM:
        opened = RandomData(shape.vocab_size, *common)
    else:
        opened = TrainingData(settings.input_dir, *common, settings.split, shape.vocab_size, keep)
    on_identity(opened.identity)
    return opened


def open_validation(settings: TrainSettings, plan: Plan, shape: ModelShape) -> Sources:
    """The validation split of the run's data. Raises UserError."""
    return [("", open_data(settings, plan, shape, "valid"))]


def prefetch(load: Callable[[int], T], steps: Iterable[int]) -> Generator[T]:
    """Yields `load(step)` for each step, while a thread loads the next. An error of `load` is raised at its step.

    The thread uses no device: allocating page-locked memory may wait for all queued work of the device, and copying a
    step's ids before its first message takes far less time than a pass.
    """
    thread = ThreadPoolExecutor(1, "data")
    loading: deque[Future[T]] = deque()
    try:
        for step in steps:
            loading.append(thread.submit(load, step))
            if len(loading) > 1:
                yield loading.popleft().result()
        while loading:
            yield loading.popleft().result()
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


LATER = ("checksums", "special_tokens", "split_special_tokens")  # identity fields that old checkpoints lack
Identity = Mapping[str, Any]  # `BatchSource.identity`


def candidates(settings: TrainSettings) -> tuple[str, list[Path]]:
    """The value of `continue_from` and the checkpoints to try, newest first. Raises UserError."""
    wanted = settings.continue_from
    if wanted == "none":
        return wanted, []
    return wanted, whole_checkpoints(settings.checkpoints) if wanted == "auto" else [Path(wanted)]


def newest(settings: TrainSettings, shape: ModelShape) -> Checkpoint | None:
    """The checkpoint from which the run will resume, by its index only; None: start from the beginning. Raises
    UserError if it is another model's, or was named and is broken."""
    wanted, folders = candidates(settings)
    for folder in folders:
        try:
            return open_checkpoint(folder, shape)
        except BrokenCheckpoint:
            if wanted != "auto":
                raise
    return None


def base_of(settings: TrainSettings, shape: ModelShape) -> str:
    """Identity of the base weights of adapters, or of DPO's reference; "": the run needs neither. Raises UserError."""
    if not (settings.adapts or settings.compares):
        return ""
    if settings.initial_weights is None:  # drawn by `SeededWeights`
        unusual = shape.initializer_range != USUAL["initializer_range"]
        return f"random, seed {settings.seed}, in tiles" + f", deviation {shape.initializer_range}" * unusual
    from .checkpoint.adapters import base_identity  # here, as it imports Paddle
    from .checkpoint.loading import open_weights

    return base_identity(open_weights(settings.initial_weights, shape))


def require_same_adapters(checkpoint: Checkpoint, now: Adapters | None) -> None:
    """Raise UserError unless the same weights are trained in the run, with the same frozen ones."""
    then = checkpoint.index.adapters
    if then == now:
        return
    if then is None or now is None:
        learns = "all weights" if then is None else "adapters"
        raise UserError(f"{checkpoint.folder}: {learns} were trained there; say the same --task, or another output_dir")
    unlike = "another base" if then.base != now.base else _differences(asdict(then), asdict(now))
    raise UserError(
        f"{checkpoint.folder}: its adapters are others ({unlike}); give the same base and options again, or another "
        "output_dir"
    )


def samples_seen(
    checkpoint: Checkpoint, now: Identity, global_batch: int, automatic: bool, say: Callable[[str], object]
) -> int:
    """Number of samples of these data that the checkpoint was trained on. `say` receives notes. Raises UserError if it
    was trained on other data and was not named (`automatic`)."""
    then = checkpoint.index.data
    if then is None:
        return 0
    was, folder = then.identity, checkpoint.folder
    if unknown := [key for key in LATER if key in now and key not in was]:
        now = {key: value for key, value in now.items() if key not in unknown}
        say(f"note: {folder}: is older and does not say its data's {', '.join(unknown)}")
    if was != now:
        unlike = _differences(was, now)
        if automatic:
            raise UserError(
                f"{folder}: the run is not resumed, as its data differ ({unlike}); give the old data and options, or "
                f"begin with the new from this checkpoint: --resume_from_checkpoint {folder}"
            )
        say(f"warning: {folder}: the data differ ({unlike}) and start from their beginning")
        return 0
    if then.global_batch != global_batch:
        say(f"warning: the global batch was {then.global_batch}, is {global_batch}; resuming at sample {then.samples}")
    return then.samples


def recipe_changes(checkpoint: Checkpoint, now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values of the recipe that differ from the checkpoint's run: old and new, by name."""
    then = checkpoint.index.recipe or {}
    return {name: (then[name], value) for name, value in now.items() if name in then and then[name] != value}


def _differences(was: Identity, now: Identity) -> str:
    """The differing fields; checksums only if no other field differs."""
    keys = [key for key in sorted({*was, *now}) if was.get(key) != now.get(key)]
    words = [f"{key}: {was.get(key)} -> {now.get(key)}" for key in keys if key != "checksums"]
    return "; ".join(words) or "another content of the same size"


def require_continuable(checkpoint: Checkpoint, settings: TrainSettings, base: str, data: Identity, batch: int) -> None:
    """Raise UserError unless the run can be resumed from a checkpoint: before ranks start. `base`: of `base_of`;
    `data`: the training data's identity, in batches of `batch` samples."""
    require_same_adapters(checkpoint, settings.adapters(base))
    identity = {**data, "reference": base} if settings.compares else data
    samples_seen(checkpoint, identity, batch, settings.continue_from == "auto", lambda note: None)
