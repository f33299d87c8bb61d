"""For any flags and profile files, `galvatron search` ends in a plan, or in one clear line a fault."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import damaged

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.cli.search import LONG

from .test_search import FIELDS, OPTIONS, words, write_profiles


def run_quietly(*arguments: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        return main(list(arguments)), err.getvalue()


def check_ending(code: int, err: str) -> None:
    assert code in (0, 2, 3), err
    on_a_busy_machine = (LONG, "searching: ")
    lines = [line for line in err.splitlines() if not line.startswith(on_a_busy_machine)]
    assert all(line.startswith("error: ") and len(line) < 600 and "unexpected" not in line for line in lines), err
    assert bool(lines) == (code != 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    write_profiles(folder)
    return folder


VALUES = st.one_of(
    st.sampled_from(["0", "1", "2", "-1", "8", "None", "", "tp+sp", "sp", "batch", "zero2", "3d", "nan", "1,2"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
)
# Options that could take long or write elsewhere are left alone.
FUZZED = sorted(set(FIELDS) - {"max_bsz", "output_config_path", "log_dir"})


@given(st.dictionaries(st.sampled_from(FUZZED), VALUES, max_size=3))
def test_random_flags_end_in_a_plan_or_a_clear_error(place, flags):
    fixed = {**OPTIONS, "model_size": place / "example.json", "profiles": place / "configs"}
    written = {"output_config_path": place / "plan.json", "log_dir": place / "logs"}
    check_ending(*run_quietly(*words(**{**fixed, **flags, **written})))


@given(st.data())
def test_damaged_profiles_end_in_a_plan_or_a_clear_error(place, data):
    files = sorted((place / "configs").glob("*.json"))
    file = data.draw(st.sampled_from(files))
    sound = file.read_text()
    content = data.draw(damaged(json.loads(sound)))
    options = {**OPTIONS, "model_size": place / "example.json", "profiles": place / "configs"}
    options |= {"output_config_path": place / "plan.json", "log_dir": place / "logs"}
    options["allow_foreign_profiles"] = data.draw(st.sampled_from([0, 1]))
    try:
        file.write_text(json.dumps(content))
        check_ending(*run_quietly(*words(**options)))
    finally:
        file.write_text(sound)
