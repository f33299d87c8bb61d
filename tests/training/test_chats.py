"""Tokens of a conversation are those of transformers for its whole text, and the learnt ones those of its answers, by
tokenizers and chat templates of each kind."""

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from fixtures import make_chats
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paddlenlp_galvatron.training.data.conversations import Encoder, Line, LineFaults, Sample
from paddlenlp_galvatron.training.data.formats import conversation_of
from paddlenlp_galvatron.training.data.templates import TurnTemplate, WholeTemplate

RECORDED = json.loads((Path(make_chats.__file__).parent / "chats.json").read_text())
TOKENIZERS = {kind: make_chats.tokenizer(kind) for kind in make_chats.KINDS}


@cache
def encoder(kind: str, template: str) -> Encoder:
    return Encoder(TOKENIZERS[kind], WholeTemplate(template, make_chats.SPECIAL, Path()), 0, 5000, 5000)


def sample(encoder: Encoder, chat) -> Sample:
    line = Line(0, 1, *conversation_of(chat))
    faults = LineFaults()
    found = list(encoder._encoded([line], faults))
    assert not faults, faults
    return found[0]


def ids(one: Sample) -> list[int]:
    return np.where(one.tokens < 0, ~one.tokens, one.tokens).tolist()


@pytest.mark.parametrize("marked", [False, True], ids=["", "generation"])
@pytest.mark.parametrize("name", make_chats.TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_and_what_is_learnt_are_those_of_transformers(kind, name, marked):
    """Where a template changes earlier answers when more follows, as Qwen3's does, the last one alone is learnt."""
    template = make_chats.TEMPLATES[name]
    encodes = encoder(kind, template if marked else make_chats.unmarked(template))
    recorded = [one for one, case in zip(RECORDED, make_chats.cases(), strict=True) if one[:2] == [kind, name]]
    chats = [chat for chat in make_chats.CHATS if make_chats.takes(name, chat)]
    for (_, _, expected, marks), chat in zip(recorded, chats, strict=True):
        found = sample(encodes, chat)
        mask = np.array([mark == "1" for mark in marks])
        changed = found.losses.unlearnt + found.losses.uncalled
        if changed:
            mask[: np.flatnonzero(~mask)[-1]] = False
        assert ids(found) == expected
        np.testing.assert_array_equal(found.tokens >= 0, mask)
        assert changed == 0 or name in ("qwen3", "r1-distill")
        thoughtless = "</think>" not in chat["messages"][-1]["content"]
        assert (found.losses.unopened > 0) == (name == "r1-distill" and thoughtless)


def text_by_jinja(name, chat) -> str:
    """As transformers renders it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(make_chats.unmarked(make_chats.TEMPLATES[name]))
    return template.render(**{"tools": None} | chat, **make_chats.SPECIAL, add_generation_prompt=False)


@given(st.sampled_from(["llama2", "llama3", "zephyr", "chatml", "qwen2.5", "qwen3"]), st.integers(0, 2**32))
def test_random_conversations_are_tokenised_as_one_text_and_learnt_where_the_template_marks_it(name, seed):
    """By random normalizers and pre-tokenizers; content without a place in a template is refused, not left out."""
    rng = random.Random(seed)
    tokenizer, chat = make_chats.random_tokenizer(rng), make_chats.random_chat(rng)
    templates = (make_chats.unmarked(make_chats.TEMPLATES[name]), make_chats.TEMPLATES[name])
    plain, marked = (
        Encoder(tokenizer, WholeTemplate(one, make_chats.SPECIAL, Path()), 0, 9999, 9999) for one in templates
    )
    special = {key for message in chat["messages"] for key in message} | chat.keys()
    lost = special & {"reasoning_content", "tool_calls", "tools"} - {"qwen2.5": {"tool_calls", "tools"}}.get(
        name, set()
    )
    if lost and name != "qwen3":
        with pytest.raises(AssertionError, match="|".join(lost)):
            sample(plain, chat)
        return
    one, other = sample(plain, chat), sample(marked, chat)
    assert ids(one) == ids(other) == tokenizer.encode(text_by_jinja(name, chat), add_special_tokens=False).ids
    np.testing.assert_array_equal(one.tokens, other.tokens)


def test_what_generation_leaves_out_of_an_answer_is_not_learnt():
    """Some templates mark the text alone, or a part of the answers."""
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% generation %}{{ m.content }}{% endgeneration %}"
    )
    text += "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    found = sample(encoder("bytes", text), {"messages": make_chats.stated("q", "four")})
    assert TOKENIZERS["bytes"].decode(found.tokens[found.tokens >= 0].tolist()) == "four"


@pytest.mark.parametrize("thoughts", ["<think>\nwhy\n</think>\n\nb", "why\n</think>\n\nb"])
def test_thoughts_that_r1_distills_template_takes_out_are_learnt_behind_its_prompt(thoughts):
    chat = {"messages": make_chats.stated("q", "<think>\nx\n</think>\n\na", "r", thoughts)}
    found = sample(encoder("bytes", make_chats.unmarked(make_chats.R1)), chat)
    text = TOKENIZERS["bytes"].decode(ids(found), skip_special_tokens=False)
    learnt = TOKENIZERS["bytes"].decode(found.tokens[found.tokens >= 0].tolist(), skip_special_tokens=False)
    assert text == "<s><|User|>q<|Assistant|>\n\na</s><|User|>r<|Assistant|><think>\nwhy\n</think>\n\nb</s>"
    assert learnt == "why\n</think>\n\nb</s>" and found.losses.unlearnt == 1


def test_an_answer_that_begins_as_the_prompt_ends_is_learnt_behind_it():
    found = sample(
        encoder("bytes", make_chats.unmarked(make_chats.R1)), {"messages": make_chats.stated("q", "<think>\nx")}
    )
    assert TOKENIZERS["bytes"].decode(found.tokens[found.tokens >= 0].tolist(), skip_special_tokens=False) == "x</s>"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (make_chats.R1.replace("<think>\n", "<think>\n</think>\n"), "takes an answer's thoughts out"),
        (make_chats.R1.replace("<|Assistant|><think>\n", "<|Model|>"), "generation prompt is not how it begins"),
    ],
)
def test_a_prompt_that_no_answer_can_follow_is_refused(template, fault):
    chat = {"messages": make_chats.stated("q", "why\n</think>\n\na" if "thoughts" in fault else "a")}
    with pytest.raises(AssertionError, match=fault):
        sample(encoder("bytes", template), chat)


def test_two_places_of_thoughts_of_which_the_template_takes_one_are_refused():
    chat = {"messages": make_chats.stated("q", "why\n</think>\n\na")}
    chat["messages"][1]["reasoning_content"] = "so"
    with pytest.raises(AssertionError, match="has thoughts in its content, too"):
        sample(encoder("bytes", make_chats.unmarked(make_chats.QWEN3)), chat)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_paddlenlps_template_is_tokenised_apart_unless_the_tokenizer_puts_a_blank_in_front(kind, tmp_path):
    parts = ["[INST] {{user}} [/INST] ", "{{bot}}</s>"]
    (tmp_path / "chat_template.json").write_text(json.dumps({"conversation": parts}))
    tokenizer = TOKENIZERS[kind]
    encodes = Encoder(tokenizer, TurnTemplate(tmp_path / "chat_template.json"), 0, 500, 500)
    found = ids(sample(encodes, {"src": ["two", "four"], "tgt": ["and", "think"]}))
    texts = ["[INST] two [/INST] ", "and</s>", "[INST] four [/INST] ", "think</s>"]
    if kind in ("prepend", "first", "always", "prefixed_bytes"):
        texts = ["".join(texts)]
    assert found == [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids]
