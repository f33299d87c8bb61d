"""Every option has a text in both languages, and no text is left of an option that went."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddlenlp_galvatron.cli.main import commands
from paddlenlp_galvatron.model import TRAINED
from paddlenlp_galvatron.options.group import Options
from paddlenlp_galvatron.options.model_options import SEQ
from paddlenlp_galvatron.options.prices import RANK
from paddlenlp_galvatron.options.texts import key_of, texts
from paddlenlp_galvatron.planner.fit import DEVICE
from paddlenlp_galvatron.planner.options import BATCH, DIMENSIONS, GPUS_PER_NODE

COMMANDS = commands()


def groups(base: type[Options] = Options) -> Iterator[type[Options]]:
    for group in base.__subclasses__():
        yield group
        yield from groups(group)


def described() -> Iterator[tuple[type[Options] | Callable[..., Any], str]]:
    """Every option with its group, and every switch with the function of its command."""
    for group in groups():
        if (
            group.__module__.startswith("paddlenlp_galvatron.") and group.__name__ != "FleetFields"
        ):  # of a recipe's file
            yield from ((group, name) for name in group.model_fields)
    for command in COMMANDS.values():
        yield from ((command.work, name) for name in command.switches)


def test_every_option_has_texts_and_every_text_has_an_option():
    keys = {key_of(owner, name): f"{owner.__module__}: {owner.__name__}.{name}" for owner, name in described()}
    assert not {key: where for key, where in keys.items() if key not in texts()}, "add them to options/texts.json"
    assert not texts().keys() - keys.keys(), "remove them from options/texts.json"
    assert not [key for key, text in texts().items() if text.keys() != {"en", "zh"} or not all(text.values())]


@pytest.mark.parametrize(
    "key, facts",
    [
        pytest.param("lora_rank", [RANK], id="rank of adapters"),
        pytest.param("TaskOptions.lora_rank", [RANK], id="rank of adapters in a search"),
        pytest.param("seq_length", [SEQ], id="sequence length"),
        pytest.param("Form.device", [DEVICE], id="device of the form"),
        pytest.param("FitOptions.device", [DEVICE], id="device of fit"),
        pytest.param("SearchOptions.num_gpus_per_node", [GPUS_PER_NODE], id="GPUs per node"),
        pytest.param("settle_bsz", [BATCH], id="global batch size"),
        pytest.param("search_space", DIMENSIONS, id="dimensions of the search space"),
        pytest.param("model_type", TRAINED, id="families of models"),
        pytest.param("family", TRAINED, id="families of a converted model"),
    ],
)
def test_a_text_states_the_default_that_the_code_has(key, facts):
    for text in texts()[key].values():
        assert all(str(fact) in text for fact in facts), text
