"""Fine-tuning data: PaddleNLP's and Hugging Face's lines as tokens, labels and rows; bad lines by file and line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddlenlp.datasets.zero_padding_dataset import ZeroPaddingMapDataset
from paddlenlp.transformers.tokenizer_utils import ChatTemplate, ChatTemplateMixin
from paddlenlp.trl import preprocess_preference_data

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.planning import with_lengths
from paddlenlp_galvatron.training.data.conversations import Encoder
from paddlenlp_galvatron.training.data.dataset import FOLDER
from paddlenlp_galvatron.training.data.formats import EXAMPLES
from paddlenlp_galvatron.training.data.templates import TurnTemplate, WholeTemplate
from paddlenlp_galvatron.training.data.tokenizer import load_tokenizer, train_tokenizer
from paddlenlp_galvatron.training.data.tuning import RowLayout, TuningData, pack

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: thoughts of earlier answers go.
FORGETFUL = CHATML.replace("m['content']", "(m['content'].split('</think>')[-1] if not loop.last else m['content'])")
TURNS = {
    "system": "<s>{{ system | default('be brief') }}\n",
    "conversation": ["[{{index}}] {{user}} -> ", "{{bot}}<|endoftext|>"],
    "query": "{{query}}",
}
LINES = [
    {"src": "two and two", "tgt": "four"},
    {
        "src": ["one", "two words here", "three"],
        "tgt": ["a", "bb", "an answer of some length"],
        "context": {"system": "s"},
    },
    {"messages": [{"role": "user", "content": "hi <|im_end|>"}, {"role": "assistant", "content": "ho <|im_end|> ha"}]},
]
LENGTH, VOCABULARY = 192, 300
pytestmark = pytest.mark.usefixtures("unlimited")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(["some words of an answer to two questions, and a few more words"], VOCABULARY - 20).save(
        str(folder / "tokenizer.json")
    )
    return folder


def write(folder: Path, lines, name="train.json"):
    folder.mkdir(exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / name).write_text(text)
    return folder


def template(tmp_path, content) -> str:
    path = tmp_path / ("chat_template.json" if isinstance(content, dict) else "chat_template.jinja")
    path.write_text(json.dumps(content) if isinstance(content, dict) else content)
    return str(path)


def data(folder, model, batch=1, split="train", **options) -> TuningData:
    layout = RowLayout(LENGTH, VOCABULARY, **{"chat_template": "plain"} | options)
    source = TuningData(folder, model, layout, batch, split)
    source.model = model  # for those who read its tokens
    return source


class Oracle(ChatTemplateMixin):
    """PaddleNLP's chat templates over the same tokenizer."""

    special_tokens_map: dict = {}  # noqa: RUF012

    def __init__(self, tokenizer, chat_template):
        self._tokenizer, self.chat_template = tokenizer, chat_template

    def encode(self, text, **_):
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=False).ids}

    def batch_encode(self, texts, **_):
        return {"input_ids": [self.encode(text)["input_ids"] for text in texts]}


def pairs(line):
    either = (line[name] if isinstance(line[name], list) else [line[name]] for name in ("src", "tgt"))
    return [list(turn) for turn in zip(*either, strict=True)]


@pytest.mark.parametrize("kind", ["turns", "whole"])
def test_tokens_are_those_of_paddlenlps_chat_templates(kind, model, tmp_path):
    """Uncut: system, then for each turn the prompt and, learnt, the answer with its end."""
    folder, tokens = write(tmp_path / "data", LINES[:2]), load_tokenizer(model)
    if kind == "turns":
        ours = TurnTemplate(Path(template(tmp_path, TURNS)))
        theirs = Oracle(tokens, ChatTemplate(**TURNS))
    else:
        ours = WholeTemplate(CHATML, {}, tmp_path)
        theirs = Oracle(tokens, ChatTemplate._compile_jinja_template(CHATML))
    for sample, line in zip(Encoder(tokens, ours, 0, 500, 500).samples([folder / "train.json"]), LINES, strict=False):
        context = {} if kind == "whole" else dict(line.get("context", {}))
        reported = theirs.encode_chat_inputs(pairs(line), context_data=context | {"is_training": True})
        expected = [~np.array(reported.get("system", []), np.int64)]
        if kind == "whole" and "context" in line:  # PaddleNLP leaves it out there
            continue
        for asked, answer in reported["conversations"]:
            expected += [~np.array(asked, np.int64), np.array(answer, np.int64)]
        np.testing.assert_array_equal(sample.tokens, np.concatenate(expected))


def shown(source: TuningData, row: int) -> tuple[str, str]:
    """A row's text, and what of it is learnt."""
    ids, labels, *_ = source.pass_rows(0, range(row + 1))
    tokenizer = load_tokenizer(source.model)
    learnt = [int(label) for label in labels[row] if label >= 0]
    return tokenizer.decode(ids[row].tolist(), skip_special_tokens=False), tokenizer.decode(learnt)


PAIRS = [
    {"src": "two and two", "tgt": [], "response": [" five ", "four"], "sort": [0, 1]},
    {"src": ["one"], "tgt": [], "response": ["a longer answer", "b"], "sort": [5, 2]},
]
SETTINGS = {"pairs": True, "packing": "in_order"}


class Stock:
    """A tokenizer as PaddleNLP's `preprocess_preference_data` takes it."""

    chat_template, eos_token_id = None, 0

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode(self, text, add_special_tokens):
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}


def documents(source: TuningData) -> list[tuple[list[int], list[int]]]:
    """Tokens and learnt labels of each, in the order of the data."""
    found = []
    ids, labels, ends, _ = source._batch(range(source.samples))
    for row in range(len(ids)):
        start = 0
        while start < LENGTH:
            stop = int(ends[row, start])
            assert start < stop and (ends[row, start:stop] == stop).all()
            learnt = labels[row, start:stop]
            if (learnt >= 0).any():
                found.append((ids[row, start:stop].tolist(), learnt[learnt >= 0].tolist()))
            start = stop
    return found


def test_pairs_are_paddlenlps_each_answer_behind_a_prompt_of_its_own(model, tmp_path):
    source = data(write(tmp_path / "data", PAIRS), model, **SETTINGS)
    expected = []
    for line in PAIRS:
        arguments = SimpleNamespace(max_seq_len=LENGTH, max_prompt_len=LENGTH), SimpleNamespace(flash_mask=True)
        reported = preprocess_preference_data(json.loads(json.dumps(line)), Stock(load_tokenizer(model)), *arguments)
        prompt, second, end, _ = reported["response_indexs"]
        ids, chosen, rejected = (reported[name] for name in ("input_ids", "response_0_labels", "response_1_labels"))
        expected += [(ids[:second], chosen[prompt:second]), (ids[:prompt] + ids[second:end], rejected[second:end])]
    assert documents(source) == expected
    facts = source._batch([0]).pairs[0]
    assert facts[:, 2:].tolist() == [[len(learnt) for _, learnt in expected[n : n + 2]] for n in (0, 2)]


def test_a_pair_that_is_too_long_loses_turns_then_its_prompts_beginning_then_its_answers_ends(model, tmp_path):
    turns = {"src": ["x" * 60, "q"], "tgt": ["y" * 60], "response": ["a" * 9, "b" * 9], "sort": [1, 0]}
    long = {"src": "p" * 300 + "q", "response": ["a" * 300, "b" * 100], "sort": [1, 0]}
    chatml, source = template(tmp_path, CHATML), None
    for line in (turns, long):
        source = data(write(tmp_path / "data", [line]), model, chat_template=chatml, src_length=99, **SETTINGS)
        (first, chosen), (second, rejected) = documents(source)
        texts = [load_tokenizer(source.model).decode(one) for one in (first, second)]
        assert all("q<|im_end|>" in text and "x" not in text.replace("<|", "") for text in texts)
        assert texts[0].split("aa")[0] == texts[1].split("bb")[0] or line is turns
        assert len(chosen) >= len(rejected) > 0
    assert len(first) + len(second) == LENGTH and len(chosen) > 2 * len(rejected)


def test_a_row_holds_both_answers_of_a_pair_under_every_packing(model, tmp_path):
    rng = np.random.default_rng(3)
    lines = [
        {"src": "q", "response": ["a" * int(rng.integers(1, 60)), "b" * int(rng.integers(1, 60))], "sort": [1, 0]}
        for _ in range(20)
    ]
    for packing in ("none", "in_order", "greedy", "best_fit"):
        source = data(write(tmp_path / "data", lines), model, pairs=True, packing=packing)
        facts = source._batch(range(source.samples)).pairs
        assert (facts[..., 2] > 0).sum() == 20 and ((facts[..., 2] > 0) == (facts[..., 3] > 0)).all()
        tokenizer = load_tokenizer(model)
        learnt = [tokenizer.decode(labels) for _, labels in documents(source)]
        assert all(set(one) == {"a"} and set(other) == {"b"} for one, other in zip(*[iter(learnt)] * 2, strict=True))


BAD_PAIRS = [
    ({"src": "a", "tgt": ["b"]}, "no two answers: this is SFT data"),
    ({"src": "a", "response": ["b"], "sort": [1]}, "response: needs two answers"),
    ({"src": "a", "response": ["b", " "], "sort": [1, 0]}, "response: needs two answers"),
    ({"src": "a", "response": ["b", "c"], "sort": [1, 1]}, "sort: says that both answers are as good"),
    ({"src": "a", "response": ["b", "c"], "sort": "10"}, "sort: needs two numbers"),
    ({"response": ["b", "c"], "sort": [1, 0]}, "src: missing"),
]


@pytest.mark.parametrize(("line", "fault"), BAD_PAIRS, ids=[fault for _, fault in BAD_PAIRS])
def test_a_bad_pair_is_named(line, fault, model, tmp_path):
    folder = write(tmp_path / "data", [PAIRS[0], line])
    with pytest.raises(UserError, match=r"train\.json: line 2: " + fault):
        data(folder, model, **SETTINGS)
    assert not (folder / FOLDER).exists()


def test_an_answer_may_hold_the_templates_own_marks(model, tmp_path):
    source = data(write(tmp_path / "data", LINES[2:]), model, chat_template=template(tmp_path, CHATML))
    _, learnt = shown(source, 0)
    assert learnt == "ho <|im_end|> ha<|im_end|>\n"


def test_without_a_template_what_is_asked_is_cut_in_front_and_the_answer_ends_if_it_is_whole(model, tmp_path):
    lines = [{"src": "abcdefghij", "tgt": "xyz"}, {"src": "a", "tgt": "y" * 300}]
    source = data(write(tmp_path / "data", lines), model, src_length=4, split="train")
    source._shuffle = False
    text, learnt = shown(source, 0)
    assert text.startswith("ghijxyz") and learnt == "xyz"  # its end token is special: no text
    ids, labels, *_ = source.rows(0, [0])
    assert labels[0, : 8 - 1].tolist() == [-100] * 3 + ids[0, 4:7].tolist() + [0]
    assert (source.rows(1, [0]).labels[0] != 0).all()  # cut, so that it has no end


def test_a_conversation_may_begin_with_an_answer(model, tmp_path):
    """Templates that look at the first message do not take an empty conversation."""
    begun = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}" + CHATML
    line = {"messages": [{"role": "assistant", "content": "Welcome"}, *LINES[2]["messages"]]}
    for text in (CHATML, begun):
        source = data(write(tmp_path / "data", [line]), model, chat_template=template(tmp_path, text))
        shows, learnt = shown(source, 0)
        assert learnt == "Welcome<|im_end|>\nho <|im_end|> ha<|im_end|>\n" and ("Help." in shows) == (text == begun)


@settings(max_examples=10)
@given(
    st.lists(st.sampled_from(["q", "a b", "words " * 9, "x" * 70, "y" * 200]), min_size=2, max_size=6),
    st.integers(60, 192),
    st.sampled_from(["chatml", "begun", "pair"]),
)
def test_a_cut_keeps_the_templates_marks_and_is_noted(model, texts, src_length, kind):
    texts = texts[: len(texts) // 2 * 2]
    begun = "{% if messages[0]['role'] != 'system' %}Help.{% endif %}" if kind == "begun" else ""
    roles = ["user", "assistant"] * (len(texts) // 2)
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    line = {"chosen": chat, "rejected": chat} if kind == "pair" else {"messages": chat}
    with TemporaryDirectory() as root:
        options = {"src_length": src_length, "chat_template": template(Path(root), begun + CHATML)}
        options |= SETTINGS if kind == "pair" else {"packing": "in_order"}
        try:
            source = data(write(Path(root) / "data", [line]), model, **options)
        except UserError as error:
            assert "no sample with anything to learn" in str(error)
            return
    tokenizer = load_tokenizer(model)
    for ids, learnt in documents(source):
        text = tokenizer.decode([*ids, learnt[-1]])
        asked, _, answered = text.rpartition("<|im_end|>\n<|im_start|>assistant\n")
        header, _, question = asked.rpartition("<|im_start|>user\n")
        assert texts[-2].endswith(question) and question and f"{texts[-1]}<|im_end|>\n".startswith(answered)
        assert header.startswith("Help." if begun else "")
        notes = " ".join(source.notes)
        assert ("without the beginning" in notes) == (question != texts[-2])
        assert ("without the end" in notes) == (answered != f"{texts[-1]}<|im_end|>\n")
        assert ("earliest turns" in notes) == (header.count("<|im_start|>") < len(texts) - 2)


def test_what_is_not_kept_writes_nothing_next_to_the_data(model, tmp_path):
    folder = write(tmp_path / "data", LINES[:1])
    layout = RowLayout(LENGTH, VOCABULARY, chat_template="plain")
    assert TuningData(folder, model, replace(layout, keep=False), 1).samples == 1 and not (folder / FOLDER).exists()
    asked = {"dataset_name_or_path": str(folder), "model_size": str(model), "packing": "in_order"}
    assert with_lengths(asked, LENGTH, VOCABULARY, lambda line: None)["tokens"] == LENGTH
    assert not (folder / FOLDER).exists()


def test_an_answer_that_the_template_changes_later_is_not_learnt(model, tmp_path):
    thoughtful = {"src": ["q", "r"], "tgt": ["<think>t</think>a", "<think>u</think>b"]}
    source = data(write(tmp_path / "data", [thoughtful]), model, chat_template=template(tmp_path, FORGETFUL))
    _, learnt = shown(source, 0)
    assert learnt == "<think>u</think>b<|im_end|>\n"
    assert "without earlier answers" in source.notes[0] and "line 1" in source.notes[0]


def test_samples_that_are_cut_away_are_named(model, tmp_path):
    lines = [{"src": "a", "tgt": "b"}, {"src": "x" * 300, "tgt": "lost"}, {"src": "c", "tgt": "d"}]
    source = data(write(tmp_path / "data", lines), model, src_length=500)
    assert source.samples == 2
    assert source.notes[0].startswith("1 sample skipped") and source.notes[0].endswith("train.json: line 2")
    with pytest.raises(UserError, match=r"line 1 is the first"):
        data(write(tmp_path / "lost", lines[1:2]), model, src_length=500)


BAD = [
    ("[1]\n", "line 1: is no JSON object"),
    ('{"src": "a"}\n', "line 1: tgt: missing"),
    ('{"src": ["a", "b"], "tgt": ["c"]}\n', "line 1: src has 2 texts and tgt 1"),
    ('\n{"src": 1, "tgt": "b"}\n', "line 2: src: is neither a text nor a list of texts"),
    ('{"messages": [{"role": "user", "content": "a"}]}\n', "line 1: messages: the last one is no answer"),
    ('{"messages": [{"role": "user"}]}\n', r"line 1: messages\[0\]: needs a role and a content"),
    ('{"src": "a", "tgt": "b"', "line 1: one JSON object a line: not valid JSON"),
    ('{"src": ["a", "b"], "tgt": ["c", "d"]}\n', "line 1: several turns, or a system text, need a chat template"),
]


@pytest.mark.parametrize(("text", "fault"), BAD, ids=[fault for _, fault in BAD])
def test_a_bad_line_is_named(text, fault, model, tmp_path):
    folder = write(tmp_path / "data", [text])
    with pytest.raises(UserError, match=r"train\.json: " + fault):
        data(folder, model)
    assert not (folder / FOLDER).exists()


def test_all_bad_lines_are_reported_at_once(model, tmp_path):
    with pytest.raises(UserError) as refused:
        data(write(tmp_path / "data", [LINES[0], "[]\n", LINES[0], "x\n"]), model)
    assert [fault.split(": ")[1] for fault in refused.value.faults] == ["line 2", "line 4"]


def test_equal_faults_are_one_line_and_sft_data_are_no_pairs(model, tmp_path):
    lines = [json.dumps({"src": "a", "tgt": "b"}) + "\n", '{"messages": []}\n']
    with pytest.raises(UserError) as refused:
        data(write(tmp_path / "data", [lines[0]] * 30 + ["[]\n"] + [lines[1]] * 3), model, pairs=True)
    file = tmp_path / "data" / "train.json"
    known = "no two answers: this is SFT data; DPO compares chosen and rejected, or the texts of response; or say "
    known += "--task sft"
    assert refused.value.faults == (
        f"{file}: line 1: {known} (and 32 more lines)",
        f"{file}: line 31: is no JSON object; give {EXAMPLES}",
    )


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.sampled_from([json.dumps(line).encode() for line in (LINES[0], PAIRS[0])]),
            st.dictionaries(
                st.sampled_from(["src", "tgt", "messages", "context", "response", "sort"]),
                st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists, max_leaves=4),
            ).map(lambda one: json.dumps(one).encode()),
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
    st.sampled_from(["plain", CHATML, TURNS]),
)
def test_hostile_lines_end_in_one_error_with_file_and_line_each(lines, pairs, content):
    with TemporaryDirectory() as root:
        folder = Path(root)
        train_tokenizer(["ab"], 257).save(str(folder / "tokenizer.json"))
        (folder / "train.json").write_bytes(b"\n".join(lines))
        chosen = content if content == "plain" else template(folder, content)
        try:
            data(folder, folder, pairs=pairs, chat_template=chosen)
        except UserError as error:
            file = re.escape(str(folder / "train.json"))
            named = [re.match(rf"{file}: (?:line (\d+): |holds no sample|it )", fault) for fault in error.faults]
            assert all(named), error.faults
            numbers = [int(one[1]) for one in named if one and one[1]]
            assert numbers == sorted(set(numbers)) and len(numbers) in (0, len(named))
            assert not (folder / FOLDER).exists()


@pytest.mark.parametrize("packing", ["in_order", "greedy"])
def test_rows_are_paddlenlps(packing):
    lengths = np.random.default_rng(1).integers(1, 60, 1200).tolist()
    records = [{"input_ids": [number] * length, "labels": [0] * length} for number, length in enumerate(lengths)]
    theirs = ZeroPaddingMapDataset(records, None, LENGTH, greedy_zero_padding=packing == "greedy")
    ours = pack(lengths, LENGTH, packing)
    assert [list(dict.fromkeys(row["input_ids"])) for row in theirs.new_data] == ours


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=60), st.sampled_from(["none", "in_order", "greedy", "best_fit"])
)
def test_each_sample_is_in_one_row_and_whole(lengths, packing):
    rows = pack(lengths, 20, packing)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= 20 for row in rows)
    if packing == "best_fit":
        assert len(rows) <= len(pack(lengths, 20, "in_order"))


def test_a_packed_row_says_where_documents_end(model, tmp_path):
    lines = [{"src": "ab", "tgt": "c" * n} for n in (1, 7, 3, 9, 90, 90, 5, 70)]
    source = data(write(tmp_path / "data", lines), model, batch=2, packing="in_order")
    alone = data(tmp_path / "data", model, packing="none")
    whole = []
    for row in range(alone.samples):
        ids, labels, ends, _ = alone.pass_rows(row, [0])
        assert ends is None
        stop = int(np.flatnonzero(labels[0] >= 0)[-1]) + 1
        whole.append((ids[0, :stop].tolist(), labels[0, labels[0] >= 0].tolist()))
    assert sorted(documents(source)) == sorted(whole)
    assert source.filled(0) == pytest.approx((source.batch(0).ids > 0).sum() / (2 * LENGTH), abs=0.1)


def test_rows_are_kept_beside_the_data_and_made_again_for_other_bytes(model, tmp_path, monkeypatch):
    folder = write(tmp_path / "data", LINES[:1] * 4)
    before = data(folder, model).batch(0)
    monkeypatch.setattr(Encoder, "samples", lambda *_: pytest.fail("they are kept"))
    np.testing.assert_array_equal(data(folder, model).batch(0).ids, before.ids)
    monkeypatch.undo()
    write(folder, [{"src": "two and two", "tgt": "five"}] * 4)
    changed = data(folder, model)
    assert (changed.batch(0).ids != before.ids).any()
    assert changed.identity != data(folder, model, packing="greedy").identity


def test_a_token_beyond_the_model_is_refused(model, tmp_path):
    with pytest.raises(UserError, match=r"train\.json: line 1: has token \d+, but the model's vocab_size is 60"):
        TuningData(write(tmp_path / "data", LINES[:1]), model, RowLayout(LENGTH, 60, chat_template="plain"), 1)


@pytest.mark.parametrize(
    ("name", "split", "fault"),
    [("nothing", "train", "no such folder"), ("data", "valid", "neither dev.json nor a folder dev")],
)
def test_lacking_splits_are_named(name, split, fault, model, tmp_path):
    write(tmp_path / "data", LINES[:1])
    with pytest.raises(UserError, match=fault):
        data(tmp_path / name, model, split=split)
