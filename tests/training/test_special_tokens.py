"""Special tokens: as transformers finds them in a tokenizer's files, and as rows and checkpoints know them."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures import make_special_tokens as recorded
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.training.data.dataset import FOLDER
from paddlenlp_galvatron.training.data.templates import WholeTemplate
from paddlenlp_galvatron.training.data.tokenizer import MODEL_FILES, end_of_text, load_tokenizer, special_tokens
from paddlenlp_galvatron.training.data.tuning import RowLayout, TuningData
from paddlenlp_galvatron.training.inputs import samples_seen

LENGTH, VOCABULARY = 64, 40
pytestmark = pytest.mark.usefixtures("unlimited")
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role[:1] }}]{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[a]{% else %}{{ eos_token }}{% endif %}"
WORDS = ["<s>", "</s>", "<end>", "de", *"<>/[]abdensu ✓"]  # the second is a word of text
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": WORDS.index(text), "content": text, "special": True, **FLAGS} for text in ("<s>", "<end>")],
    "model": {"type": "BPE", "vocab": {text: number for number, text in enumerate(WORDS)}, "merges": []},
}
MODEL = {
    "tokenizer.json": TOKENIZER,
    CONFIG: {"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<end>", "chat_template": TEMPLATE},
}
LINES = '{"src": "a sad bus", "tgt": "d</s>ead e<s>"}\n{"src": "be", "tgt": "Nun ✓"}\n'


def write(folder: Path, files: dict) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_special_tokens_and_ids_are_those_of_transformers():
    """Folders that name them in one file or several, as text, object or null, equal or not."""
    for reported in json.loads((recorded.HERE / "special_tokens.json").read_text()):
        with tempfile.TemporaryDirectory() as made:
            folder = write(Path(made), recorded.files(reported["seed"]))
            tokenizer, texts = load_tokenizer(folder / "tokenizer.json"), special_tokens(folder).texts
            eos = texts.get("eos_token")
            found = {
                "named": {name: text for name, text in texts.items() if text is not None},
                "eos": None if eos is None else end_of_text(tokenizer, folder).token,
                "probe": tokenizer.encode(recorded.PROBE, add_special_tokens=False).ids,
                "around": tokenizer.encode("a").ids,
            }
        assert found == {name: value for name, value in reported.items() if name != "seed"}, reported["seed"]


def front(*texts: str) -> dict:
    """A post-processor that puts tokens in front of a text."""
    single = [{"SpecialToken": {"id": text, "type_id": 0}} for text in texts] + [
        {"Sequence": {"id": "A", "type_id": 0}}
    ]
    known = {text: {"id": text, "ids": [WORDS.index(text)], "tokens": [text]} for text in texts}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}


MATTER = {  # file, field, another value
    "a token of tokenizer.json": (
        "tokenizer.json",
        "added_tokens",
        [*TOKENIZER["added_tokens"], {"id": 3, "content": "de", "special": False, **FLAGS}],
    ),
    "its normalizer": ("tokenizer.json", "normalizer", {"type": "Lowercase"}),
    "its post-processor": ("tokenizer.json", "post_processor", front("<s>")),
    "eos_token": (CONFIG, "eos_token", "</s>"),
    "an object": (CONFIG, "eos_token", {"__type": "AddedToken", "content": "</s>", **FLAGS}),
    "bos_token": (CONFIG, "bos_token", "<end>"),
    "no bos_token": (CONFIG, "bos_token", None),
    "chat_template": (CONFIG, "chat_template", "b" + TEMPLATE),
    "a token without a name": (CONFIG, "additional_special_tokens", ["de"]),
    "added_tokens_decoder": (CONFIG, "added_tokens_decoder", {"1": {"content": "</s>", "special": True, **FLAGS}}),
    "split_special_tokens": (CONFIG, "split_special_tokens", True),
    "special_tokens_map": (MAP, "eos_token", {"content": "</s>", **FLAGS}),
    "its bos_token": (MAP, "bos_token", "</s>"),
    "added_tokens.json": ("added_tokens.json", "de", 3),
    "chat_template.jinja": ("chat_template.jinja", None, "bad" + TEMPLATE),
}
DO_NOT = {
    "truncation": (
        "tokenizer.json",
        "truncation",
        {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
    ),
    "padding_side": (CONFIG, "padding_side", "left"),
    "pad_token": (CONFIG, "pad_token", "<s>"),
    "model_max_length": (CONFIG, "model_max_length", 3),
    "clean_up_tokenization_spaces": (CONFIG, "clean_up_tokenization_spaces", True),
    "add_bos_token": (CONFIG, "add_bos_token", True),
    "add_eos_token": (CONFIG, "add_eos_token", True),
    "given already": (MAP, "eos_token", "<end>"),
    "vocab.json": ("vocab.json", "a", 1),
    "merges.txt": ("merges.txt", None, "a b"),
    "tokenizer.model": ("tokenizer.model", None, "a"),
    "another template": ("additional_chat_templates/rag.jinja", None, "a"),
    "generation_config.json": ("generation_config.json", "eos_token_id", [2, 1]),
}


def changed(files: dict, *changes: tuple) -> dict:
    for name, key, value in changes:
        files = files | {name: value if key is None else files.get(name, {}) | {key: value}}
    return files


def read(data: Path, model: Path, **options):
    """Rows and their identity, or the fault."""
    try:
        source = TuningData(data, model, RowLayout(LENGTH, VOCABULARY, src_length=LENGTH, **options), 1)
    except UserError as error:
        return str(error).replace(f"{data}/", ""), None
    return [part.tolist() for part in source.pass_rows(0, range(source.samples))[:2]], source.identity


@given(
    st.lists(st.sampled_from([*MATTER.values(), *DO_NOT.values()]), max_size=2),
    st.lists(st.sampled_from([*MATTER.values(), *DO_NOT.values()]), max_size=2),
    st.sampled_from([None, "plain"]),
)
def test_kept_rows_are_never_those_of_other_files(before, after, template):
    """Rows that are read where others are kept are those of a folder where none are; and they have another identity if
    they are others, so that no checkpoint continues with them."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        first = read(
            write(folder / "a", {"train.json": LINES}),
            write(folder / "old", changed(MODEL, *before)),
            chat_template=template,
        )
        model = write(folder / "new", changed(MODEL, *before, *after))
        seen = read(folder / "a", model, chat_template=template)
        assert seen == read(write(folder / "b", {"train.json": LINES}), model, chat_template=template)
        assert first[0] == seen[0] or first[1] != seen[1]


@pytest.mark.parametrize("change", MATTER)
def test_what_decides_a_token_is_read_again(change, tmp_path):
    """By name: the part of the identity that changed."""
    data = write(tmp_path / "data", {"train.json": LINES})
    _, first = read(data, write(tmp_path / "old", MODEL))
    _, then = read(data, write(tmp_path / "new", changed(MODEL, MATTER[change])))
    unlike = [name for name in first if first[name] != then[name]]
    assert unlike and set(unlike) <= {"tokenizer", "special_tokens", "chat_template", "split_special_tokens"}
    with pytest.raises(UserError, match=f"{unlike[0]}: .* -> "):
        continued(first, then)


@pytest.mark.parametrize("change", DO_NOT)
def test_what_decides_no_token_is_not(change, tmp_path):
    data = write(tmp_path / "data", {"train.json": LINES})
    first = read(data, write(tmp_path / "old", MODEL))
    kept = sorted((data / FOLDER).iterdir())
    assert read(data, write(tmp_path / "new", changed(MODEL, DO_NOT[change]))) == first
    assert sorted((data / FOLDER).iterdir()) == kept


def continued(was: dict, now: dict) -> int:
    """Samples that a run continues at, whose checkpoint has an identity, on data of another."""
    position = SimpleNamespace(identity=was, global_batch=1, samples=7)
    checkpoint = SimpleNamespace(folder=Path("checkpoint-1"), index=SimpleNamespace(data=position))
    return samples_seen(checkpoint, now, 1, automatic=True, say=print)


def test_checkpoints_from_before_go_on_with_a_note(tmp_path, capsys):
    """They have no special tokens; all else is compared."""
    data = write(tmp_path / "data", {"train.json": LINES})
    _, now = read(data, write(tmp_path / "model", MODEL))
    was = {name: value for name, value in now.items() if "special" not in name}
    assert continued(was, now) == 7
    assert "does not say its data's special_tokens, split_special_tokens" in capsys.readouterr().out
    with pytest.raises(UserError, match="tokenizer: 0 -> "):
        continued(was | {"tokenizer": "0"}, now)


# --- ends


@given(
    st.sampled_from(["absent", None, "<end>", "</s>", {"content": "<s>"}]),
    st.sampled_from(["absent", None, "<end>", "</s>", {"content": "<s>", "special": False}]),
    st.sampled_from(["absent", None, -1, 2, [1], [2, 0], []]),
    st.sampled_from(["absent", 1, [0, 1], 99]),
    st.sampled_from([[], ["</s>"], ["<|endoftext|>", "</s>"]]),
)
def test_the_end_is_the_tokenizers_then_the_models_then_a_known_one_with_a_note(config, later, stops, more, special):
    words = {**TOKENIZER["model"]["vocab"], "<|endoftext|>": 30}
    added = [{"id": words[text], "content": text, "special": True, **FLAGS} for text in special]
    files: dict = {
        "tokenizer.json": TOKENIZER | {"added_tokens": added, "model": TOKENIZER["model"] | {"vocab": words}}
    }
    named = {CONFIG: ("eos_token", config), MAP: ("eos_token", later)}
    named |= dict(zip(MODEL_FILES, [("eos_token_id", stops), ("eos_token_id", more)], strict=True))
    files |= {name: {key: value} for name, (key, value) in named.items() if value != "absent"}
    own = config if later == "absent" else later
    own = None if own == "absent" else own["content"] if isinstance(own, dict) else own
    ids = next(
        (one if isinstance(one, list) else [one] for one in (stops, more) if one not in ("absent", None, -1, [])), []
    )
    with tempfile.TemporaryDirectory() as made:
        folder = write(Path(made), files)
        tokenizer = load_tokenizer(folder)
        try:
            end = end_of_text(tokenizer, folder)
        except UserError as error:
            assert own is None and (len(ids) > 1 or ids == [99] or not ids + special)
            assert "name it" in str(error)
            return
    assert end.token == words[end.text]
    if own is not None:
        assert end.text == own and bool(end.note) == bool(ids and words[own] not in ids)
    elif ids:
        assert [end.token] == ids and "eos_token_id" in end.note
    else:
        assert end.text == special[0] and "name no eos_token" in end.note


@pytest.mark.parametrize("named", ["tokenizer.json", "."])
def test_documents_end_with_the_tokenizers_own_end(named, tmp_path, capsys):
    """Though its vocabulary has a word that ends documents elsewhere; named by its file or by its folder."""
    model = write(tmp_path / "model", MODEL)
    text = write(tmp_path / "text", {"a.txt": "a bus"}) / "a.txt"
    words = ("data", "prepare", text, "--tokenizer", model / named, "--output", tmp_path / "x", "--json")
    command = [str(word) for word in words]
    assert main(command) == 0
    out, err = capsys.readouterr()
    reported = json.loads(out)
    assert (reported["end_token"], reported["end_token_id"]) == ("<end>", 2) and "note: " not in err
    write(model, {CONFIG: {}, "config.json": {"eos_token_id": [0, 2]}})
    assert main(command) == 2
    stated = capsys.readouterr().err
    assert "eos_token_id" in stated and "0 (<s>), 2 (<end>)" in stated and stated.count("\n") == 1
    assert main([*command, "--end_token", "</s>"]) == 0
    assert json.loads(capsys.readouterr().out)["end_token_id"] == 1
    (model / CONFIG).unlink()
    (model / "config.json").unlink()
    assert main(command) == 2
    assert "its special tokens: <s>, <end>; name it" in capsys.readouterr().err


# --- templates


@pytest.mark.parametrize(
    ("template", "tokens", "text"),
    [
        ("{{ bos_token }}a", {}, "bos_token is not defined; name it"),
        ("a{{ 'b' + eos_token }}", {}, "eos_token is not defined"),
        ("{{ [sep_token] | join }}", {}, "sep_token is not defined"),
        ("{{ bos_token ~ 'a' }}", {}, "bos_token is not defined; name it"),
        ("{{ bos_token }}a", {"bos_token": None}, "a"),
        ("{{ 'a' + bos_token }}", {"bos_token": None}, "'bos_token' is undefined"),
        ("{% if bos_token %}b{% endif %}{{ eos_token | default('e') }}{{ other }}", {}, "e"),
        ("{% if bos_token is defined and bos_token is not none %}b{% endif %}a", {"bos_token": None}, "a"),
        ("{{ messages[0].eos_token }}a", {}, "a"),
        ("{{ eos_token }}", {"eos_token": "<e>"}, "<e>"),
    ],
)
def test_a_token_that_no_file_names_is_an_error_that_names_it(template, tokens, text, tmp_path):
    made = WholeTemplate(template, tokens, tmp_path)
    messages = [{"role": "user", "content": "q"}]
    if len(text) > 4:
        with pytest.raises(UserError, match=text):
            made.whole(messages, {})
    else:
        assert made.whole(messages, {}) == text


OTHERS = ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda one: (
            st.lists(one, max_size=2)
            | st.dictionaries(st.sampled_from(["content", "special", "1", "eos_token"]), one, max_size=3)
        ),
        max_leaves=6,
    ),
    st.sampled_from([CONFIG, MAP, "added_tokens.json", "config.json"]),
    st.sampled_from([*("eos_token", "bos_token", "x_token", "eos_token_id"), *OTHERS, None]),
)
def test_whatever_is_written_there_is_taken_or_refused_by_file(value, file, key):
    with tempfile.TemporaryDirectory() as made:
        folder = write(
            Path(made),
            changed({"tokenizer.json": TOKENIZER}, (file, key, value))
            if key
            else {"tokenizer.json": TOKENIZER, file: json.dumps(value)},
        )
        try:
            end_of_text(load_tokenizer(folder), folder)
        except UserError as error:
            assert str(folder) in str(error) or "eos_token" in str(error)
