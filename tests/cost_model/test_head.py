"""The LM head by pieces of tokens: its memory as counted in a real one, its messages, times and launches."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.base.units import FP32_BYTES, MIB
from paddlenlp_galvatron.cost_model.collectives import Setting, vocab_calls
from paddlenlp_galvatron.cost_model.vocabulary import HeadShare, piece_passes, piece_room
from paddlenlp_galvatron.cost_model.weights import StateBytes
from paddlenlp_galvatron.measure.part import CheapWeights, FakeGroups
from paddlenlp_galvatron.model import ModelShape
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, Plan, Precision, VocabStrategy
from paddlenlp_galvatron.plan.comm_points import Collective
from paddlenlp_galvatron.plan.precision import NumberTypes
from paddlenlp_galvatron.profiles.computation import PassTimes
from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.groups import RankGroups
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.stage import Stage

TOKENS, HIDDEN = 512, 32
SHAPE = ModelShape("wide", "llama", 1, HIDDEN, 128, 4, 4, 128_256, TOKENS)
LOGITS_MIB = TOKENS * SHAPE.vocab_size * FP32_BYTES / MIB


class Used:
    """MiB that a head's passes take beyond its memory between micro-batches: whole, or by pieces."""

    def __init__(self, pieces: int, **assumed: bool):
        plan = Plan(
            world_size=2,
            global_batch=1,
            micro_batches=1,
            stages=(1, 0),
            layers=(LayerStrategy(),),
            vocab=VocabStrategy(pieces=pieces),
            assumed=Assumptions(seq_length=TOKENS, **assumed),
        )
        self.assumed, self.sizes = plan.assumed, tuple(plan.vocab.piece_sizes(TOKENS))
        weights = CheapWeights(SHAPE.initializer_range)
        setup = ModelSetup.of(plan, SHAPE, TOKENS, source=weights)
        stage = Stage(setup, RankGroups(plan, 1, FakeGroups()))
        labels = stage.take(np.random.default_rng(0).integers(SHAPE.vocab_size, size=(1, TOKENS)))[0]
        for _ in range(2):  # the first allocates the summed gradients
            x = paddle.randn([TOKENS, HIDDEN])
            x.stop_gradient = False
            start = device.allocated_mib()
            device.reset_peak()
            out = stage.forward(x, labels, labels)
            self.kept, self.peak = device.allocated_mib() - start, device.peak_mib() - start
            device.reset_peak()
            out.backward()
            stage.accumulate_gradients()
            self.peak = max(self.peak, device.peak_mib() - start)
            del out


used = cache(Used)


def test_the_peak_is_an_eighth_of_three_times_the_logits_and_as_predicted():
    whole, some = used(1), used(16)
    # Logits, exponentials and their gradient took three times as much as logits; now each takes the place of the other.
    assert whole.peak < 1.1 * LOGITS_MIB and some.peak < 3 * LOGITS_MIB / 8
    share = HeadShare(TOKENS, SHAPE.vocab_size, HIDDEN, False, some.sizes)
    room = piece_room(
        (whole.peak, whole.kept), share, some.assumed, StateBytes.of(NumberTypes.of(Precision.FP32)), learns=True
    )
    assert room.activation_mib == pytest.approx(some.kept, abs=0.1)
    assert room.activation_mib + room.working_mib == pytest.approx(some.peak, rel=0.02)


def test_each_micro_batch_in_flight_has_its_table_s_gradient_where_it_is_reduced_by_itself():
    table_mib = SHAPE.vocab_size * HIDDEN * FP32_BYTES / MIB
    assert used(16, async_grad_reduce=False).kept - used(16).kept == pytest.approx(table_mib, rel=0.01)


def test_messages_of_the_loss_are_as_many_bytes_in_more_calls():
    assumed = Assumptions(sequence_parallel=True, seq_length=1000)
    setting = Setting(4, 2, True, 1, 1000, assumed, StateBytes.of(NumberTypes.of(Precision.FP32)))
    vocab = VocabStrategy(2)

    def losses(pieces: int) -> Counter[int]:
        calls = vocab_calls(SHAPE, replace(vocab, pieces=pieces), "last", setting).forward
        return Counter({c.bytes: c.times for c in calls if c.kind is Collective.ALL_REDUCE})

    assert losses(1) == {4000: 3} and losses(3) == {334 * 4: 3, 333 * 4: 6}


def test_pieces_take_as_long_as_so_few_tokens_and_at_least_their_launches():
    def times(share: float) -> PassTimes:
        return PassTimes(1 + 10 * share, 2 + 20 * share)

    share = HeadShare(1000, 100, 10, False, (250,) * 4)
    passes = piece_passes(times, share, PassTimes(0.1, 0.1), 0.0, frozen=False)
    assert (passes.forward_ms, passes.backward_ms) == (pytest.approx(30 + 4 * 3), 0)
    assert piece_passes(times, share, PassTimes(0.1, 0.1), 0.0, frozen=True).forward_ms == pytest.approx(20 + 4 * 2)
    assert piece_passes(times, share, PassTimes(15.0, 0.1), 10.0, frozen=False).forward_ms == pytest.approx(60 - 10)
