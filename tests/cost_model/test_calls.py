"""As many gradient messages as are priced: each has its latency, which on small layers is all of its price."""

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.cost_model.collectives import PART, REPLICAS, Call, Setting, layer_calls, matrix_calls
from paddlenlp_galvatron.cost_model.weights import StateBytes
from paddlenlp_galvatron.plan import Assumptions, DataParallel, LayerStrategy, ModelShape, Precision
from paddlenlp_galvatron.plan.comm_points import Collective
from paddlenlp_galvatron.plan.mesh import SHARDING
from paddlenlp_galvatron.plan.precision import NumberTypes
from paddlenlp_galvatron.runtime import units


class Group:
    nranks, rank, ranks, id = 2, 0, (0, 1), 1


@pytest.mark.parametrize("dp_type", DataParallel)
def test_a_layers_gradients_go_in_one_message(dp_type, monkeypatch):
    import paddle

    from paddlenlp_galvatron.runtime.weights import ShardedParameter, Slice

    sent: list[int] = []

    class Pending:
        def __init__(self, result):
            self.wait = lambda: result

    def reduced(tensor, group):
        sent.append(int(tensor.size))
        return Pending(tensor)

    monkeypatch.setattr(units, "all_reduce_start", reduced)
    monkeypatch.setattr(units, "reduce_scatter_start", reduced)
    shape = ModelShape("small", "llama", 1, 32, 64, 4, 4, 64, 16)
    tensors = [
        paddle.create_parameter(list(weight.shape), "float32") for weight in shape.block.weights if weight.sharded
    ]
    weights = [ShardedParameter("w", tuple(t.shape), Slice(), t, Group, 2) for t in tensors]
    unit = units.make_unit(weights, dp_type, every_micro_batch=False)
    monkeypatch.setattr(units.ShardedUnit, "finish_reductions", lambda self: None)
    for weight in weights:
        weight.accumulate(paddle.ones(weight.shape))
    unit.backward_done(last=True)
    unit.finish()
    setting = Setting(2, 2, True, 1, 16, Assumptions(seq_length=16), StateBytes.of(NumberTypes.of(Precision.FP32)))
    priced = layer_calls(shape, LayerStrategy(dp_type=dp_type), setting).reduce
    assert [4 * size for size in sent] == [call.bytes for call in priced for _ in range(call.times)]
    if dp_type is DataParallel.DDP:
        assert all(bool((weight.gradient == 1).all()) for weight in weights)


@pytest.mark.parametrize("each", [False, True])
def test_parts_sum_up_a_shard_once_a_step(each):
    shape = ModelShape("small", "llama", 1, 32, 64, 4, 4, 64, 16)
    setting = Setting(
        8, 8, True, 1, 16, Assumptions(async_grad_reduce=not each), StateBytes.of(NumberTypes.of(Precision.BF16))
    )
    all_ranks, parts = (
        layer_calls(shape, LayerStrategy(2, dp_type=DataParallel.ZERO3, sharding=sharding), setting)
        for sharding in (None, 2)
    )
    assert (all_ranks.across, all_ranks.reduce[0].axes) == ((), SHARDING)
    [reduce], [across], [gather] = parts.reduce, parts.across, parts.gather_forward
    assert reduce == all_ranks.reduce[0]._replace(axes=PART) and gather == all_ranks.gather_forward[0]._replace(
        axes=PART
    )
    assert across == Call(Collective.ALL_REDUCE, REPLICAS, reduce.bytes // 2)
    assert parts.vectors == all_ranks.vectors


def test_shares_that_do_not_divide_are_padded():
    """Ten numbers over three ranks: shares of four."""
    setting = Setting(3, 3, True, 1, 16, Assumptions(), StateBytes.of(NumberTypes.of(Precision.FP32)))
    calls = matrix_calls(10, DataParallel.ZERO3, SHARDING, 3, None, setting)
    assert [call.bytes for call in (*calls.gather_forward, *calls.gather_backward, *calls.reduce)] == [48, 48, 48]
