"""The LM head and its loss by pieces of tokens, from its times and memory, measured or derived, of all tokens at once.

Forward then computes losses and gradients of each piece and keeps the hidden states' gradient alone, so that exactly
the logits are no longer kept. A piece takes as long as so few tokens alone, its launches and its sum of the table's
gradient included, or as its host takes to launch it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..base.units import FP32_BYTES, MIB
from ..plan.strategy import Assumptions
from ..profiles.computation import PassTimes
from .module import Room
from .weights import StateBytes


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's share of the LM head and its loss."""

    tokens: float
    columns: int  # of the vocabulary
    hidden_size: int
    split: bool  # the vocabulary, over ranks
    sizes: tuple[int, ...]  # tokens of each piece


def piece_passes(
    times: Callable[[float], PassTimes], share: HeadShare, launch: PassTimes, messages_ms: float, frozen: bool
) -> PassTimes:
    """Times of a head by pieces; `times` by the share of the tokens, `launch` of a layer's forward, which has as
    many calls as a piece."""
    pieces = len(share.sizes)
    one = times(1 / pieces)
    backward_ms = one.forward_ms if frozen else one.backward_ms
    each = PassTimes(pieces * (one.forward_ms + backward_ms), 0.0)
    return each.launched(PassTimes(pieces * launch.forward_ms, 0.0), messages_ms)


def piece_room(
    whole: tuple[float, float], share: HeadShare, assumed: Assumptions, states: StateBytes, learns: bool
) -> Room:
    """Memory of a head by pieces. `whole`: MiB at the peak and kept, of all tokens at once; the same where only the
    peak is known."""
    number = assumed.mixed_precision.bytes
    hidden_mib = share.tokens * share.hidden_size * number / MIB
    peak_mib, kept_mib = whole
    if kept_mib < peak_mib:
        kept_mib = max(kept_mib - share.tokens * share.columns * FP32_BYTES / MIB, hidden_mib)
    else:  # the norm's input and output, and the gradient
        kept_mib = min(kept_mib, 3 * hidden_mib)
    numbers = share.columns * share.hidden_size if learns else 0
    piece_mib = max(share.sizes) * share.columns * FP32_BYTES / MIB
    half_mib = piece_mib / 2 if number < FP32_BYTES else 0.0  # of 16 bits
    scoring_mib = piece_mib + half_mib
    if assumed.fused_cross_entropy and share.split:  # which does not compute in place
        scoring_mib = 2 * piece_mib
    adding_mib = (half_mib or piece_mib) + numbers * number / MIB  # the table's gradient, to be added to their sum
    gradient_mib = numbers * states.gradient / MIB
    if not assumed.async_grad_reduce:  # each micro-batch in flight has its own
        kept_mib += gradient_mib
    working_mib = hidden_mib + max(scoring_mib, adding_mib, hidden_mib)  # of pieces, and joined
    return Room(kept_mib, working_mib, gradient_mib if assumed.async_grad_reduce else 0.0)
