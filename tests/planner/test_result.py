"""An answer's explanation: where time goes, bottlenecks, why families were rejected."""

import pytest
from cost_examples import MODEL, example

from paddlenlp_galvatron.planner import FamilyOutcome, SearchOptions, SearchResult, search

VALUES = {"num_nodes": 2, "num_gpus_per_node": 4, "settle_bsz": 32, "seq_length": 512, "memory_constraint": 8}


def answer(**changed: object) -> SearchResult:
    options = SearchOptions.from_mapping(VALUES | changed)
    return search(MODEL, example(), options)


def test_the_parts_of_a_step_add_up_and_name_the_loss() -> None:
    result = answer(top_k=30)
    assert result.best and len(result.runners_up) > 5
    for other in result.runners_up:
        parts = other.parts_ms()
        assert sum(parts.values()) == pytest.approx(other.time_s * 1000 / other.plan.global_batch)
        assert min(parts.values()) >= 0
        reason = other.why_slower_than(result.best)
        assert any(f"slower: {part} " in reason for part in parts)
    deep = [other for other in result.runners_up if len(other.plan.stages) == 8 and other.plan.micro_batches == 1]
    assert all("pipeline bubble" in other.why_slower_than(result.best) for other in deep)


def test_every_family_has_a_fate_and_no_rejected_one_could_win() -> None:
    result = answer(disable_tp=True)
    assert result.best and set(result.outcomes.values()) >= {FamilyOutcome.NOT_DIVISIBLE, FamilyOutcome.SOLVED}
    assert set(result.bounds_s) >= {
        f for f, outcome in result.outcomes.items() if outcome is FamilyOutcome.OUT_OF_BOUND
    }
    for family, outcome in result.outcomes.items():
        assert outcome.words in result.outcome(family)
        if outcome is FamilyOutcome.OUT_OF_BOUND:
            assert result.bounds_s[family] / family.global_batch >= result.time_s / result.plan.global_batch * (
                1 - 1e-9
            )


@pytest.mark.parametrize("batch", [8, 256])
def test_what_binds_is_the_largest_part_of_the_largest_term(batch: int) -> None:
    need = answer(memory_constraint=0.05, settle_bsz=batch, disable_sdp=True).need
    assert need is not None
    memory = need.prediction.stages[need.stage].memory
    assert need.enough_mib == max(stage.memory.total_mib for stage in need.prediction.stages) == memory.total_mib
    assert need.term_mib == max(memory.states_mib, memory.activations_mib, memory.working_mib, memory.context_mib)
    layers = need.plan.stage_layers(need.stage)
    assert need.term_mib / (len(layers) + 1) <= need.part_mib <= need.term_mib
    assert f"stage {need.stage} (layers {layers[0]}-" in str(need) and f"GiB of it {need.term} on stage" in str(need)
