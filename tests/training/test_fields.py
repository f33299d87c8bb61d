"""Fields of a line that change the learnt tokens: honoured, or refused by file, line and name; never left out."""

import json
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from fixtures import make_chats
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.training.data.conversations import Encoder, Line, LineFaults, PairEncoder
from paddlenlp_galvatron.training.data.formats import conversation_of, pair_of
from paddlenlp_galvatron.training.data.templates import TurnTemplate, WholeTemplate
from paddlenlp_galvatron.training.data.tuning import RowLayout, TuningData

LENGTH = 2000
pytestmark = pytest.mark.usefixtures("unlimited")
TOKENIZER = make_chats.tokenizer("bytes")
QWEN3, CHATML = (make_chats.unmarked(make_chats.TEMPLATES[name]) for name in ("qwen3", "chatml"))
TURNS = {"system": "{{system}}\n", "conversation": ["Q: {{user}} A:", " {{bot}}</s>"]}
TWO = ["q", "BAD", "r", "good"]
TOOLS = make_chats.CHATS[3]["tools"]
PAIR = {"src": ["q"], "tgt": [], "response": ["good", "worse"], "sort": [1, 0]}


class Read:
    """The trained parts of lines: text and learnt text of each conversation, and the notes."""

    def __init__(self, folder: Path, lines, template=CHATML, packing="none", **options):
        TOKENIZER.save(str(folder / "tokenizer.json"))
        name = "plain" if template is None else folder / ("t.json" if isinstance(template, dict) else "t.jinja")
        if template is not None:
            name.write_text(json.dumps(template) if isinstance(template, dict) else template)
        (folder / "train.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = {"chat_template": str(name), "packing": packing, **options}
        special = folder / "tokenizer_config.json"
        special.write_text(json.dumps(make_chats.SPECIAL))
        data = TuningData(folder, folder, RowLayout(LENGTH, 5000, **settings), 1)
        ids, labels, *_ = data._batch(range(data.samples))
        self.texts = [self._text(row[row > 0]) for row in ids]
        self.learnt = [self._text(row[row >= 0]) for row in labels]
        self.notes = " ".join(data.notes)

    @staticmethod
    def _text(tokens) -> str:
        return TOKENIZER.decode(tokens.tolist(), skip_special_tokens=False)


def messages(*texts, **fields):
    """The fields are the first answer's."""
    stated = make_chats.stated(*texts)
    stated[1] |= fields
    return {"messages": stated}


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("name", ["weight", "loss", "train", "trainable"])
def test_an_answer_or_a_line_that_is_masked_is_not_learnt(name, packing, tmp_path):
    lines = [messages(*TWO, **{name: 0}), messages(*TWO, **{name: True}), messages(*TWO) | {name: False}]
    read = Read(tmp_path, lines, packing=packing)
    good, both = "good<|im_end|>\n", "BAD<|im_end|>\ngood<|im_end|>\n"
    assert "".join(read.learnt) == good + both
    assert all("BAD" in text for text in read.texts)
    assert "1 sample skipped, as its own fields" in read.notes and "line 3" in read.notes
    read = Read(tmp_path, lines, packing=packing, all_learnt=True)
    assert "BAD" not in "".join(read.learnt).split("good")[0] and "".join(read.learnt).count("user\n") == 4


@pytest.mark.parametrize("template", [CHATML, TURNS], ids=["whole", "turns"])
def test_erniekits_system_and_label_are_honoured(template, tmp_path):
    line = {"system": "Answer in rhymes.", "src": ["q", "r"], "tgt": ["BAD", "good"], "label": [0, 1]}
    read = Read(tmp_path, [line], template)
    assert "Answer in rhymes." in read.texts[0].split("q")[0]
    assert "good" in read.learnt[0] and "BAD" not in read.learnt[0]
    pair = Read(tmp_path, [PAIR | {"system": "Answer in rhymes."}], template, pairs=True)
    assert pair.texts[0].count("Answer in rhymes.") == 2


def test_thoughts_calls_and_tools_are_rendered_where_the_template_takes_them(tmp_path):
    chat = make_chats.THOUGHTFUL
    read = Read(tmp_path, [chat, chat | {"tools": json.dumps(TOOLS)}], QWEN3)
    assert read.texts[0] == read.texts[1] and '"parameters"' in read.texts[0].split("two and two")[0]
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>\n'
    assert read.learnt[0] == f"<think>\nadd them\n</think>\n\n{called}<think>\ndone\n</think>\n\nfour<|im_end|>\n"


def test_tools_stay_where_earlier_turns_are_left_out(tmp_path):
    chat = {"messages": make_chats.stated("x" * LENGTH, "y", "q", "z", system="s"), "tools": TOOLS}
    read = Read(tmp_path, [chat], make_chats.unmarked(make_chats.QWEN2))
    assert '"parameters"' in read.texts[0] and "xxx" not in read.texts[0] and read.learnt[0] == "z<|im_end|>\n"


def test_thoughts_of_earlier_answers_that_a_template_takes_out_are_noted(tmp_path):
    read = Read(tmp_path, [messages(*TWO, reasoning_content="why")], QWEN3)
    assert "BAD" not in read.learnt[0] and "without earlier answers" in read.notes


def test_keys_that_are_not_read_are_counted_once(tmp_path):
    line = messages(*TWO, id=3, name="bot") | {"source": "web", "id": 5, "rejected": None, "images": []}
    read = Read(tmp_path, [line, line, messages(*TWO)])
    assert read.notes == (
        "keys that are not read, each with its number of lines: id (2), messages.id (2), source (2) "
        "rows are filled to 1.6% (3 samples); several share a row with --packing best_fit"
    )
    assert Read(tmp_path, [line, line, messages(*TWO)]).notes == read.notes  # which were kept


REFUSED = [
    (messages(*TWO, weight=0.5), r"messages\[1\].weight: is 0.5"),
    (messages(*TWO, weight="0"), r"messages\[1\].weight: is '0'"),
    (messages(*TWO, loss=True, train=False), r"messages\[1\].loss, train: contradict"),
    (messages(*TWO) | {"weight": 2}, "weight: is 2"),
    (messages(*TWO, loss_mask=[0]), r"messages\[1\].loss_mask: seems to change"),
    (messages(*TWO, images=["a.png"]), r"messages\[1\].images: seems to change.*text alone"),
    (messages(*TWO, tool_calls=[make_chats.CALL]), r"messages\[1\].tool_calls: the chat template leaves it out"),
    (messages(*TWO, function_call={"name": "f"}), r"messages\[1\].function_call: the chat template"),
    (messages(*TWO, reasoning_content="why"), r"messages\[1\].reasoning_content: the chat template"),
    (messages(*TWO) | {"tools": TOOLS}, "tools: the chat template leaves it out"),
    (messages(*TWO) | {"tools": "f(x)"}, "tools: not valid JSON"),
    (messages(*TWO) | {"tools": [1]}, "tools: is no list of objects"),
    (messages(*TWO) | {"label": [0, 1]}, "label: seems to change"),
    (messages(*TWO) | {"history": [["a", "b"]]}, "history: seems to change"),
    (messages(*TWO) | {"videos": ["a"]}, "videos: seems to change"),
    (messages(*TWO) | {"rejected": "a"}, "rejected: seems to change.*--task dpo"),
    (messages(*TWO) | {"src": "a", "tgt": "b"}, "src: seems to change"),
    (messages(*TWO) | {"context": {"topic": "x"}}, "context.topic: the chat template leaves it out"),
    (messages(*TWO) | {"context": {"messages": []}}, "context.messages: belongs to the line itself"),
    (messages(*TWO) | {"context": {"tools": TOOLS}}, "context.tools: belongs to the line itself"),
    ({"messages": make_chats.stated(*TWO, system="a"), "system": "b"}, r"system: messages\[0\] is another"),
    ({"src": "q", "tgt": "a", "system": 1}, "system: is no text"),
    ({"src": "q", "tgt": "a", "label": [0.5]}, "label: needs a number for each text of tgt"),
    ({"src": ["q", "r"], "tgt": ["a", "b"], "label": [1]}, "label: needs a number for each text of tgt"),
    (
        {"messages": [{"role": "user", "content": "q", "weight": 1}, *make_chats.stated("", "a")[1:]]},
        r"messages\[0\]: is to",
    ),
    ({"messages": [{"role": "assistant", "content": None}]}, r"messages\[0\]: needs a role and a content"),
]


@pytest.mark.parametrize(("line", "fault"), REFUSED, ids=[fault for _, fault in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_line_and_field(line, fault, tmp_path):
    with pytest.raises(UserError, match=r"train\.json: line 2: " + fault):
        Read(tmp_path, [messages(*TWO), line])


@pytest.mark.parametrize(
    "fields",
    [
        {"chosen": "a", "rejected": "b"},
        {"messages": [], "prompt": "q"},
        {"label": [1]},
        {"images": ["a"]},
        {"loss": 0.1},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("line", [PAIR, {}], ids=["pair", "alone"])
def test_other_forms_of_pairs_are_refused_by_name(line, fields, tmp_path):
    expected = "src|no two answers|prompt|" + next(iter(fields))  # which alone lacks, too
    if "messages" in fields:
        fields["messages"] = make_chats.stated("q", "a")
    with pytest.raises(UserError, match=rf"line 1: ({expected})"):
        Read(tmp_path, [line | fields], pairs=True)


QUOTING = make_chats.QWEN2  # writes calls by `tojson`
TAKES_TEXT = make_chats.QWEN2.replace("(c.function | tojson)", "c.function.name + ': ' + c.function.arguments")
PRINTING = make_chats.QWEN2.replace("(c.function | tojson)", "c.function.name ~ ': ' ~ c.function.arguments")


@pytest.mark.parametrize("template", [QUOTING, TAKES_TEXT, PRINTING], ids=["quoting", "takes a text", "printing"])
@pytest.mark.parametrize("arguments", [{"city": "Bern"}, {}], ids=["one", "none"])
@pytest.mark.parametrize("flat", [False, True], ids=["in function", "flat"])
def test_arguments_of_calls_are_learnt_as_json_whether_given_as_object_or_text(template, arguments, flat, tmp_path):
    learnt = set()
    for given_as in (arguments, json.dumps(arguments)):
        function = {"name": "weather", "arguments": given_as}
        call = function if flat else {"type": "function", "function": function}
        chat = messages("q", "", "r", "good", tool_calls=[call])
        text = make_chats.unmarked(template.replace("c.function", "c") if flat else template)
        learnt.add(Read(tmp_path, [chat], text).learnt[0])
    assert len(learnt) == 1 and json.dumps(arguments) in learnt.pop().split("good")[0]


def test_a_null_content_that_the_template_reads_is_named(tmp_path):
    chat = messages("q", None, "r", "good", tool_calls=[make_chats.CALL])
    with pytest.raises(UserError, match=r"line 1: the chat template refuses it: .*messages\[1\] has no content"):
        Read(tmp_path, [chat])


def test_calls_that_the_template_changes_later_are_named(tmp_path):
    read = Read(tmp_path, [make_chats.CHATS[3]], QWEN3)
    assert "without earlier calls of tools" in read.notes and "add" not in read.learnt[0]


def test_a_pair_that_is_masked_is_left_out(tmp_path):
    read = Read(tmp_path, [PAIR, PAIR | {"response": ["x", "y"], "weight": 0}], pairs=True)
    assert len(read.texts) == 1 and "x" not in read.texts[0] and "line 2" in read.notes


@pytest.mark.parametrize("role", ["system", "tool", "developer"])
def test_a_message_that_the_template_leaves_out_is_refused(role, tmp_path):
    """Also a text that stands elsewhere, too."""
    deaf = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] in ('user', 'assistant') %}")
    line = {"messages": [{"role": role, "content": "q"}, *make_chats.stated(*TWO)]}
    with pytest.raises(UserError, match=r"line 1: messages\[0\]: the chat template leaves it out"):
        Read(tmp_path, [line], deaf)


def test_without_a_template_nothing_is_left_out_either(tmp_path):
    for fields in ({"system": "s"}, {"context": {"system": "s"}}, {"tools": TOOLS}, {"context": {"x": 1}}):
        with pytest.raises(UserError, match="line 1: several turns, or a system text, need a chat template, as do"):
            Read(tmp_path, [{"src": "q", "tgt": "a", **fields}], None)


class Turns(TurnTemplate):
    def __init__(self):
        with NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(TURNS, file)
            file.flush()
            super().__init__(Path(file.name))


TEMPLATES = {
    "chatml": WholeTemplate(CHATML, make_chats.SPECIAL, Path()),
    "qwen3": WholeTemplate(QWEN3, make_chats.SPECIAL, Path()),
    "turns": Turns(),
}
WORDS = ["weight", "loss", "train", "trainable", "label", "tools", "tool_calls", "function_call", "reasoning_content"]
WORDS += ["system", "images", "video", "history", "rejected", "chosen", "loss_mask", "sampleWeight", "source", "id"]
WORDS += ["thinking", "audio_path", "system_prompt", "functions", "context", "x", "é", "src", "sort", "prefix", "name"]
VALUES = st.recursive(
    st.sampled_from([0, 1, True, False, 0.5, -1, "", "0", "text", None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=2),
    max_leaves=3,
)


@given(
    st.sampled_from(WORDS),
    VALUES,
    st.sampled_from(["line", "message", "pair"]),
    st.sampled_from(["chatml", "qwen3", "turns"]),
)
def test_no_field_is_dropped(key, value, where, template):
    """It changes the rows, or is named in a note, or by an error with its line; or states the default."""
    plain: dict = dict(PAIR) if where == "pair" else messages(*TWO)
    changed = {**plain, key: value}
    if where == "message":
        *before, last = plain["messages"]
        changed = {"messages": [*before, {**last, key: value}]}
    says_nothing = value in (None, "", [], {}) or key == "name"
    says_nothing |= key in WORDS[:4] and value in (1, True)
    says_nothing |= isinstance(value, dict) and all(one is None for one in value.values())
    unchanged, _ = rows(plain, template, where == "pair")
    try:
        after, unread = rows(changed, template, where == "pair")
    except UserError as error:
        assert key in str(error) or "the chat template refuses it" in str(error)
        return
    assert after != unchanged or says_nothing or key in unread, (key, value)


def rows(line, template, pairs):
    """Tokens of the conversations of a line, and its keys that are not read."""
    kind, parsed = (PairEncoder, pair_of(line)) if pairs else (Encoder, conversation_of(line))
    faults = LineFaults()
    encoder = kind(TOKENIZER, TEMPLATES[template], 0, LENGTH, LENGTH)
    found = list(encoder._encoded([Line(0, 1, *parsed)], faults))
    if faults:
        raise UserError(faults.named([Path("x")]))
    return [one.tokens.tolist() for one in found], {name.removeprefix("messages.") for name in parsed.unread}
