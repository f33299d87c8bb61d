"""Searches that a signal ends, each held in its own process until it has come; a run that is stopped is not done."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paddlenlp_galvatron.plan import read_plan

HELD = Path(__file__).with_name("held_search.py")
ASKED = {"device": "h100", "gpus": 8, "batch": 32, "seq": 1024, "memory_constraint": 8, "top_k": 1000}
SEARCH = ["search", "qwen2.5-0.5b", *(f"--{name}={value}" for name, value in ASKED.items())]  # of many families
PROMPT_S = 3.0  # of processor time; 0.1 is usual, and 2 were seen once on a busy host


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def used_s(pid: int) -> float:
    """Processor time of a process until now."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]  # proc(5)
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def of_children_s() -> float:
    """Processor time of all processes that this one started and has seen the end of."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def interrupted(number: signal.Signals, solved: int, command: list[str]) -> tuple[int, str, str]:
    """Exit code and output of a command that got the signal inside the search's core, after so many families."""
    others_s = of_children_s()
    program = [sys.executable, str(HELD), str(solved), *command]
    ran = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert ran.stdout is not None
        while (line := ran.stdout.readline()) != "held\n":
            assert line, ran.communicate()
        until_now_s = used_s(ran.pid)
        ran.send_signal(number)
        out, err = ran.communicate(timeout=600)
        assert of_children_s() - others_s - until_now_s < PROMPT_S
    finally:
        ran.kill()
    assert "Traceback" not in err
    return ran.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_best_plan_so_far_is_written_with_its_bound(folder, galvatron, number):
    code, out, err = interrupted(number, 2, [*SEARCH, "-o", "plan.json"])
    assert code == 130, err
    assert "interrupted: this is the best plan so far; the fastest takes at most" in " ".join(out.split())
    assert "no plan of the space takes less than" in out and "left with a gap" in out
    found = read_plan(folder / "plan.json").metadata["predicted"]
    assert galvatron(*SEARCH, "-o", "exact.json").code == 0
    exact = read_plan(folder / "exact.json").metadata["predicted"]
    assert 0 < found["lower_bound_s"] <= exact["time_s"] <= found["time_s"]
    assert found["gap"] == pytest.approx(1 - found["lower_bound_s"] / found["time_s"])


def test_programs_read_of_the_interrupt_in_notes():
    code, out, _ = interrupted(signal.SIGINT, 2, [*SEARCH, "--json", "-o", "plan.json"])
    answer = json.loads(out.splitlines()[-1])
    assert code == 130 and answer["feasible"] and answer["plan"] == "plan.json"
    assert any(note.startswith("interrupted") for note in answer["notes"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_where_no_plan_was_found_nothing_is_written_and_that_is_reported(folder, number):
    code, out, err = interrupted(number, 0, [*SEARCH, "-o", "plan.json"])
    assert (code, out, err) == (130, "", "interrupted: no plan was found yet, so none is written\n")
    assert not (folder / "plan.json").exists() and not (folder / "logs").exists()


def test_in_python_ctrl_c_gives_the_best_plan_so_far_or_is_raised(folder):
    program = folder / "mine.py"
    program.write_text(
        "import sys\nfrom paddlenlp_galvatron import search\nimport held_search\n"
        f"try:\n    found = search('qwen2.5-0.5b', **{ASKED})\n"
        "    print(found.plan, found.notes)\nexcept KeyboardInterrupt as error:\n    print(error)\n"
    )
    for solved, stated in ((2, "<PlanFile: 24 layers on 8 GPUs"), (0, "no plan was found yet")):
        ran = subprocess.Popen(
            [sys.executable, program, str(solved)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(HELD.parent)},
        )
        try:
            assert ran.stdout is not None and ran.stdout.readline() == "held\n"
            ran.send_signal(signal.SIGINT)
            out, _ = ran.communicate(timeout=600)
        finally:
            ran.kill()
        assert ran.returncode == 0 and out.startswith(stated)
        assert ("interrupted: this is the best plan so far" in out) == (solved > 0)


@pytest.mark.parametrize("command", ["fit", "explain"])
def test_other_searches_end_at_once_and_write_nothing(folder, galvatron, command):
    assert galvatron(*SEARCH, "-o", "plan.json").code == 0
    before = sorted(folder.rglob("*"))
    asked = {"fit": ["fit", "qwen2.5-7b", "--device", "h100", "--gpus", "8"], "explain": ["explain", "plan.json"]}
    code, _, err = interrupted(signal.SIGINT, 0, asked[command])
    assert code == 130 and err.splitlines()[-1] == "interrupted"
    assert sorted(folder.rglob("*")) == before


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("codes", "starts"), [("1 137 0", 3), ("2", 1), ("1 143", 2), ("130", 1), ("129", 1)])
def test_the_loop_of_the_documentation_starts_again_after_crashes_alone(tmp_path, language, codes, starts):
    lines = (DOCS / language / "checkpoints.md").read_text().splitlines()
    (loop,) = [line for line in lines if line.startswith("    until galvatron train ")]
    (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n")
    for name, body in {
        "galvatron": 'echo >> starts; code=$(sed -n "$(wc -l < starts)p" codes); exit ${code:-99}',
        "sleep": "exit 0",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", loop], cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=20, check=False)
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
