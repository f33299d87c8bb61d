"""The update copies no gradient, and starts passing values on before it waits for any."""

from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")

import paddle
import paddle.distributed as dist

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.runtime import collectives, device, gradients
from paddlenlp_galvatron.runtime.paddle_private import MultiTensorAdamW, window
from paddlenlp_galvatron.runtime.units import ALIGNED_BYTES, Trainable
from paddlenlp_galvatron.training.recipe import Recipe

SIZE = 4


class Owner:
    """The data of one tensor; writes down the calls of the update."""

    def __init__(self, name, reported):
        self.name, self.reported, self.kept = name, reported, paddle.full([SIZE], 2.0)

    @property
    def gradient(self):
        return self.kept

    def drop_gradient(self):
        self.kept = None

    def publish(self, updated):
        self.reported.append(f"start {self.name}")

    def published(self):
        self.reported.append(f"wait {self.name}")


def test_values_are_passed_on_as_they_are_updated_and_nothing_waits(monkeypatch):
    reported = []
    monkeypatch.setattr(gradients, "TURN_BYTES", 2 * SIZE * gradients.FP32_BYTES)  # two tensors a turn
    tensors = [paddle.create_parameter([SIZE], "float32") for _ in range(4)]
    trainables = [
        Trainable(tensor, (), True, Owner(name, reported)) for name, tensor in zip("abcd", tensors, strict=True)
    ]
    optimizer = paddle.optimizer.SGD(0.1, parameters=tensors)
    step = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: (reported.append("update"), step()))
    gradients.update_in_turns(optimizer, trainables, factor=1.0)
    first, second = ["update", "start a", "start b"], ["update", "start c", "start d"]
    assert reported == [*first, *second]  # nobody waits: the next forward pass does, module by module


@pytest.mark.parametrize("offset", range(5))
def test_a_gradient_begins_where_a_kernel_may_load_four_numbers_at_once(offset):
    """Behind a weight of an odd size it does not: a misaligned address ends all that a GPU was given to do."""
    tensor, owner = paddle.create_parameter([SIZE], "float32"), Owner("a", [])
    owner.kept = window(paddle.arange(16, dtype="float32"), offset, offset + SIZE, [SIZE])
    Trainable(tensor, (), True, owner).present_gradient(1.0)
    assert tensor.grad.data_ptr() % ALIGNED_BYTES == 0
    assert tensor.grad.tolist() == [offset + n for n in range(SIZE)]


def test_tensors_beyond_what_a_kernel_counts_are_updated_by_another(monkeypatch):
    tensor = paddle.create_parameter([SIZE], "float32")
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    assert isinstance(Recipe().build([tensor], []), MultiTensorAdamW)
    monkeypatch.setattr(MultiTensorAdamW, "MOST", SIZE - 1)
    assert not isinstance(Recipe().build([tensor], []), MultiTensorAdamW)
    with pytest.raises(UserError, match="use_multi_tensor: its kernel takes at most 3"):
        Recipe(use_multi_tensor=True).build([tensor], [])


def test_a_gradient_is_shared_and_not_copied():
    tensor, owner = paddle.create_parameter([SIZE], "float32"), Owner("a", [])
    place = owner.kept.data_ptr()
    Trainable(tensor, (), True, owner).present_gradient(0.5)
    assert tensor.grad.data_ptr() == place
    assert tensor.grad.tolist() == [1.0] * SIZE


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_what_is_needed_at_once_runs_in_the_queue_of_what_is_computed(monkeypatch, kind):
    """Else two events a call: that queue waits for the other one, which waits for it."""
    asked = []
    done = SimpleNamespace(wait=lambda: True, is_completed=lambda: True)
    monkeypatch.setattr(dist.stream, kind, lambda *_, **given: (asked.append(given), done)[1])
    group = SimpleNamespace(ranks=[0, 1], nranks=2, id=0, rank=0)
    getattr(collectives, kind)(paddle.ones([SIZE]), group)
    getattr(collectives, f"{kind}_start")(paddle.ones([SIZE]), group).wait()
    at_once, later = ({name: how[name] for name in ("sync_op", "use_calc_stream") if name in how} for how in asked)
    assert at_once == {"sync_op": True, "use_calc_stream": True}
    assert later == {"sync_op": False}


def test_what_hangs_in_the_queue_of_what_is_computed_is_named(monkeypatch):
    """Paddle calls it completed when it is queued; that its host waits shows much later, in another call, or never."""
    there = []
    collectives._started.clear()  # of the tests before in this process
    event = SimpleNamespace(record=lambda: None, query=lambda: bool(there))
    monkeypatch.setattr(paddle.device.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    done = SimpleNamespace(wait=lambda: True, is_completed=lambda: True)
    monkeypatch.setattr(dist.stream, "all_reduce", lambda *_, **__: done)
    group = SimpleNamespace(ranks=[0, 1], nranks=2, id=0, rank=0)
    collectives.all_reduce(paddle.ones([SIZE]), group)
    assert collectives.oldest()[0].startswith("all_reduce of ranks 0, 1")
    there.append(True)
    collectives.within("cross entropy", group, there.clear)
    assert collectives.oldest()[0].startswith("cross entropy of ranks 0, 1")
    there.append(True)
    assert collectives.oldest() is None


@pytest.mark.parametrize("together", [False, True])
def test_an_optimizer_has_its_states_before_its_first_step(together):
    parameter = paddle.create_parameter([64, 64], "float32")
    before = device.allocated_mib()
    optimizer = Recipe(use_multi_tensor=together).over(4).build([parameter], [parameter.name])
    made = device.allocated_mib() - before
    assert made >= 2 * 64 * 64 * 4 / 2**20
    parameter.grad = paddle.ones([64, 64])
    optimizer.step()
    assert device.allocated_mib() - before < made + 1.5 * 64 * 64 * 4 / 2**20  # its gradient alone
