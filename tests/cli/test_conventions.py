"""The conventions of options, on a command made with `App`, and the ends of a command in `main`."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron import __version__
from paddlenlp_galvatron.base.errors import GalvatronError, Infeasible, UserError
from paddlenlp_galvatron.base.process import INTERRUPTED
from paddlenlp_galvatron.check.findings import EXIT_CODES as OF_CHECKS
from paddlenlp_galvatron.cli import main as cli
from paddlenlp_galvatron.cli.command import EXIT_CODES, App, FromFile
from paddlenlp_galvatron.options.aliases import ALIASES, TYPES, VALUES
from paddlenlp_galvatron.options.foreign import FOREIGN
from paddlenlp_galvatron.options.group import Options, read_words
from paddlenlp_galvatron.options.texts import texts


class Probed(Options):
    folder: Path | None = None
    memory_constraint: float | None = None
    settle_chunk: int = 4
    sequence_parallel: bool = False
    no_async_grad_reduce: bool | None = None
    name: tuple[str, ...] = ()


app = App()


@pytest.fixture(autouse=True)
def described(monkeypatch):
    for name in ("folder", "name"):
        monkeypatch.setitem(texts(), name, {"en": f"the {name}"})


@app.command(FromFile, Probed, positional={"folder": "FOLDER", "name": "NAME..."})
def probe(values: dict[str, Any], json: bool) -> None:
    """Keep its arguments."""
    seen.append(Probed.from_values(values))


seen: list[Probed] = []


def run(*words: str) -> Probed:
    assert cli.run(app, words, "galvatron probe") == 0
    return seen.pop()


@pytest.mark.parametrize(
    "option", ["--memory_constraint", "--memory-constraint", "--memory_upper_limit", "--memory-upper-limit"]
)
@pytest.mark.parametrize("form", [lambda option: [option, "24"], lambda option: [f"{option}=24"]])
def test_dash_and_underscore_and_aliases_are_the_same(option, form):
    assert run(*form(option)).memory_constraint == 24.0


@pytest.mark.parametrize("word", ["1", "true", "True", "TRUE"])
def test_true(word):
    assert run("--sequence_parallel", word).sequence_parallel is True
    assert run(f"--sequence-parallel={word}").sequence_parallel is True


@pytest.mark.parametrize("word", ["0", "false", "False"])
def test_false(word):
    assert run("--sequence_parallel", word).sequence_parallel is False
    assert run("--no_async_grad_reduce", word).no_async_grad_reduce is False


def test_a_bare_boolean_takes_nothing_from_what_follows():
    given = run("--sequence_parallel", "folder", "--no-async-grad-reduce", "--settle_chunk", "2")
    assert given.sequence_parallel is given.no_async_grad_reduce is True
    assert (given.folder, given.settle_chunk) == (Path("folder"), 2)


def test_none_leaves_an_option_unset():
    given = run("--memory_constraint", "None", "--settle_chunk=None", "--no_async_grad_reduce", "None")
    assert (given.memory_constraint, given.settle_chunk, given.no_async_grad_reduce) == (None, 4, None)


def test_values_that_look_like_something_else():
    assert run("--settle_chunk", "-1").settle_chunk == -1
    assert run("--name", "a=b", "--name", "").name == ("a=b", "")
    assert run("here", "a", "b").name == ("a", "b")
    assert run("here", "--name", "a", "b").name == ("a", "b")
    assert run("--", "--settle_chunk").folder == Path("--settle_chunk")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory_constrain", "1"], "--memory_constrain: unknown option; did you mean --memory_constraint?"),
        (["--memory_uper_limit", "1"], "--memory_uper_limit: unknown option; did you mean --memory_upper_limit?"),
        (["--recommend_min_bsz", "1"], "--recommend_min_bsz: 1 is not supported: the search needs no head start"),
        (["--max_memory", "1"], "--max_memory: unknown option; did you mean --memory_constraint?"),
        (["--frobnicate", "1"], "--frobnicate: unknown option; --help lists all"),
        (["--settle_chunk"], "--settle_chunk: a value is missing"),
        (["--settle_chunk", "--sequence_parallel"], "--settle_chunk: a value is missing"),
        (["--sequence_parallel=2"], "--sequence_parallel: '2' is no boolean"),
        (["--settle-chunk", "two"], "settle_chunk: must be a whole number (it is 'two')"),
        (["one", "--folder", "two"], "FOLDER: given twice, also as --folder"),
        (["-x"], "-x: unknown option"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    with pytest.raises(UserError) as error:
        run(*words)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_gives_options_and_no_switches(tmp_path):
    (tmp_path / "options.yaml").write_text("name: [a]\nsettle-chunk: 2\n")
    given = run("--config", str(tmp_path / "options.yaml"), "--settle_chunk", "3")
    assert (given.name, given.settle_chunk) == (("a",), 3)
    for switch in ("json", "config"):  # which would have no effect there
        (tmp_path / "options.yaml").write_text(f"{switch}: 1\n")
        with pytest.raises(UserError, match=f"{switch}: unknown option"):
            run("--config", str(tmp_path / "options.yaml"))


@given(st.lists(st.sampled_from(["--a", "--b", "--a=1", "--b=0", "1", "0", "None", "x", "--"])))
def test_canonical_words_are_stable(words):
    """Canonical options stay as they are."""
    options = {"a": False, "b": True}
    try:
        pairs, loose = read_words(words, options)
    except UserError:
        return
    assert read_words([*(f"--{name}={value}" for name, value in pairs), "--", *loose], options) == (pairs, loose)


def test_aliases_lead_to_names_and_not_to_aliases():
    assert not set(ALIASES) & set(ALIASES.values())
    assert not set(FOREIGN) & {*ALIASES, *ALIASES.values()}
    assert set(VALUES) <= {*ALIASES, *TYPES, "model_type"}
    assert all(name.isidentifier() for name in [*ALIASES, *ALIASES.values(), *FOREIGN])


def test_a_word_of_another_dialect_is_a_value_of_ours():
    pairs, _ = read_words(["--search_granularity", "coarse-grained"], {"fine_grained_mode": True})
    assert pairs == [("fine_grained_mode", "0")]


def test_a_name_means_another_option_where_a_command_has_none_of_its_own():
    search = {"device": False, "profiles": False, "settle_bsz": False, "world_size": False}
    assert read_words(["--analytic", "h100", "--batch", "8"], search)[0] == [("device", "h100"), ("settle_bsz", "8")]
    pairs = [("world_size", "8"), ("device", "h100")]
    assert read_words(["--gpus=8", "--device=h100", "--analytic"], search)[0] == pairs
    profile = {"analytic": False, "gpus": False, **search}
    assert read_words(["--analytic", "h100", "--gpus=8"], profile)[0] == [("analytic", "h100"), ("gpus", "8")]
    assert read_words(["-o", "there"], {"output_dir": False})[0] == [("output_dir", "there")]


def test_an_option_without_an_effect_may_stand_at_the_value_that_changes_nothing():
    assert run("--recommend_min_bsz", "0", "--costmodel-coe=1", "--settle_chunk", "2").settle_chunk == 2


def test_help_shows_the_canonical_names(capsys):
    cli.run(app, ["--help"], "galvatron probe")
    shown = capsys.readouterr().out
    cli.run(app, ["-h"], "galvatron probe")
    assert capsys.readouterr().out == shown
    assert "--memory_constraint" in shown and "--sequence_parallel " in shown and "-constraint" not in shown
    assert "--no_async_grad_reduce 0|1" in shown and "--memory_upper_limit" in shown  # which may be unset; another name


def test_version_and_help(galvatron):
    assert galvatron("--version") == (0, f"galvatron {__version__}\n", "")
    assert galvatron() == galvatron("--help")
    assert galvatron().code == 0
    for name in cli.COMMANDS:
        assert name in galvatron().out
        shown = galvatron(name, "--help")
        assert shown.code == 0 and "..." not in shown.out.partition("Commands:")[2]  # each sentence is whole
        assert all(EXIT_CODES in " ".join(out.split()) for out in (shown.out, galvatron().out))  # of any width


def test_help_names_all_commands_of_a_group_and_every_exit_code():
    groups: dict[str, list[str]] = {}
    for words in cli.commands():
        name, _, own = words.partition(" ")
        groups.setdefault(name, []).extend([own] if own else [])
    for name, own in groups.items():
        if own:
            assert sorted(cli.COMMANDS[name].partition(": ")[2].split(", ")) == sorted(own)
    ends = {
        0,
        *(error.exit_code for error in (GalvatronError, UserError, Infeasible)),
        INTERRUPTED,
        128 + signal.SIGTERM,
    }
    codes = {int(number) for number in re.findall(r"\b\d+\b", EXIT_CODES)}
    assert codes == ends | set(OF_CHECKS.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plam"], "plam: unknown command; did you mean plan?"),
        (["zzz"], "zzz: unknown command; known:"),
        (["--versoin"], "--versoin: unknown option; did you mean --version?"),
        (["plan", "chekc"], "galvatron plan chekc: unknown command; did you mean check?"),
        (
            ["plan"],
            "galvatron plan: a command is missing; give one of show, check, uniform, diff, scale, spare, trace, ",
        ),
        (["plan", "check"], "FILE"),
    ],
)
def test_an_unknown_command_is_one_line_and_exit_code_2(galvatron, words, message):
    ran = galvatron(*words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and message in ran.err and ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "lines"),
    [
        (UserError(["one: wrong", "two:\nwrong"]), 2, ["error: one: wrong", "error: two: wrong"]),
        (Infeasible("nothing fits"), 3, ["error: nothing fits"]),
        (GalvatronError("failed"), 1, ["error: failed"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
        (
            ModuleNotFoundError("No module named 'paddle'", name="paddle"),
            1,
            ["error: paddle is not installed, and this command needs it; docs/en/installation.md says how"],
        ),
        (
            ZeroDivisionError("a\nb"),
            1,
            ["error: unexpected ZeroDivisionError: a b; --debug shows where, and a report is welcome"],
        ),
    ],
)
def test_how_a_command_can_end(galvatron, monkeypatch, raised, code, lines):
    def fail(words):
        raise raised

    monkeypatch.delenv("GALVATRON_DEBUG", raising=False)
    monkeypatch.setattr(cli, "_run", fail)
    assert galvatron("plan") == (code, "", "\n".join(lines) + "\n")


def test_debug_shows_an_unexpected_error(galvatron, monkeypatch):
    monkeypatch.setattr(cli, "_run", lambda words: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        galvatron("plan", "--debug")
    monkeypatch.setenv("GALVATRON_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        galvatron("plan")
