"""Files of a model's folder are programs of others: each that needs all memory, or never ends, is one line."""

import json

import pytest
from fixtures import make_chats

from paddlenlp_galvatron.base import process
from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.training.data.tuning import RowLayout, TuningData

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x=messages[0].role) %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
CALLED = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
GROWS = {"type": "Replace", "pattern": {"String": "q"}, "content": 50 * "q"}
TURNS = {"conversation": ["{{user}}", "{{bot}}"]}


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        pytest.param(
            "tokenizer.json",
            {"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 6}},
            "of memory",
            id="a normalizer that grows",
        ),
        pytest.param("tokenizer_config.json", {"chat_template": DOUBLED}, "of memory", id="a text that doubles"),
        pytest.param(
            "tokenizer_config.json",
            {"chat_template": "{{ 'a' * 10000000000 }}"},
            r"result of \* is too large",
            id="a product of constants",
        ),
        pytest.param("chat_template.jinja", ENDLESS, "takes more than 1 s", id="loops in loops"),
        pytest.param("chat_template.jinja", "{{ 10 ** 100000000 }}", r"result of \*\* is too large", id="a power"),
        pytest.param("chat_template.jinja", CALLED, "recursion", id="a macro that calls itself"),
        pytest.param(
            "chat_template.jinja", "{{ " + "(" * 20000 + ")" * 20000 + " }}", "no Jinja template", id="brackets"
        ),
        pytest.param(
            "chat_template.jinja",
            "{% for a in b %}" * 30 + "{% endfor %}" * 30,
            "is no Jinja template",
            id="nested blocks",
        ),
        pytest.param("chat_template.jinja", "{{ 'a' | center(10000000000) }}", "of memory", id="a filter"),
        pytest.param("chat_template.json", {**TURNS, "system": "{{ '%9999999999d' % 1 }}"}, "of memory", id="a width"),
        pytest.param("chat_template.json", {**TURNS, "system": ENDLESS}, "more than 1 s", id="loops in a system text"),
    ],
)
def test_a_bomb_in_a_models_folder_is_a_line(name, content, fault, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "LEAST_S", 1.0)
    monkeypatch.setattr(process, "LEAST_MIB", 300)
    files = {
        "tokenizer.json": json.loads(make_chats.tokenizer("bytes").to_str()),
        "tokenizer_config.json": make_chats.SPECIAL,
    }
    files[name] = {**files.get(name, {}), **content} if isinstance(content, dict) else content
    for file, held in files.items():
        (tmp_path / file).write_text(held if isinstance(held, str) else json.dumps(held))
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.json").write_text(json.dumps({"src": "q" * 300, "tgt": "a"}) + "\n")
    template = str(tmp_path / name) if name == "chat_template.json" else None
    with pytest.raises(UserError, match=fault) as refused:
        TuningData(data, tmp_path, RowLayout(500, 5000, chat_template=template), 1)
    assert len(refused.value.faults) == 1 and not list(data.glob("*/*"))
