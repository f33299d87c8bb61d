"""The compiled core: the documented one-line build, sanitizers, Ctrl-C, threads, and refusal of bad arrays."""

import ctypes
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import galvatron_dp_core
import numpy as np
import pybind11
import pytest

from paddlenlp_galvatron.plan import Schedule

from .test_pipeline import free, lists, tables

ENGINE = Path(__file__).parents[2] / "search_engine"
COMPILER = shutil.which("c++")
PROMPT_S = 1.0  # of processor time: the promise for Ctrl-C
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs the program c++")


def compile_core(folder: Path, *flags: str) -> Path:
    """Build the module as the user documentation says, with other flags."""
    module = folder / f"galvatron_dp_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]
    command = [str(COMPILER), *flags, "-Wall", "-Wextra", "-Werror", "-shared", "-std=c++17", "-fPIC"]
    subprocess.run([*command, *includes, "dp_core.cpp", "-o", str(module)], cwd=ENGINE, check=True, timeout=600)
    return module


def documented_line(language: str) -> str:
    """The line that compiles the core by hand, with this environment's programs."""
    page = (ENGINE.parent / "docs" / language / "installation.md").read_text()
    (line,) = (line.strip() for line in page.splitlines() if line.strip().startswith("c++ "))
    suffix = f"-o galvatron_dp_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert line.endswith("-o galvatron_dp_core$(python3-config --extension-suffix)")
    return line.partition(" -o ")[0].replace("python3 ", f"{sys.executable} ") + f" {suffix}"


@needs_compiler
@pytest.mark.slow
def test_the_documents_line_builds_it(tmp_path: Path) -> None:
    assert documented_line("en") == documented_line("zh")
    folder = shutil.copytree(ENGINE, tmp_path / "engine")
    subprocess.run(documented_line("en"), shell=True, cwd=folder, check=True, timeout=600)
    program = "import galvatron_dp_core as core; print(core.Cancel().cancelled)"
    path = f"import sys; sys.path[:0] = [{str(folder)!r}, {_site_packages()!r}]"
    command = [sys.executable, "-S", "-c", f"{path}; {program}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "False\n"


@needs_compiler
def test_an_older_standard_is_reported(tmp_path: Path) -> None:
    line = documented_line("en").replace("-std=c++17", "-std=c++11 -fsyntax-only -Wfatal-errors")
    ran = subprocess.run(line, shell=True, cwd=ENGINE, capture_output=True, text=True, timeout=120)
    errors = [text for text in ran.stderr.splitlines() if "error" in text]
    assert ran.returncode and "galvatron_dp_core needs C++17: compile it with -std=c++17" in errors[0]


def _site_packages() -> str:
    """Where the libraries are; `-S` and this path keep an installed core out of the way."""
    return str(Path(np.__file__).parents[1])


@needs_compiler
@pytest.mark.slow
def test_is_clean_under_sanitizers(tmp_path: Path) -> None:
    """Whole pipelines and single stages against brute force, with every access and sum of the core watched."""
    compile_core(tmp_path, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    runtime = subprocess.run(
        [str(COMPILER), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    program = f"""
import sys
sys.path[:0] = {[str(tmp_path), str(Path(__file__).parents[1]), str(ENGINE.parent), _site_packages()]!r}
import galvatron_dp_core
assert galvatron_dp_core.__file__.startswith({str(tmp_path)!r})
from planner.test_interleaved import problem, search
from planner.test_pipeline import check
for seed in range(1000):
    check(seed)
    if seed % 4 == 0:
        search(*problem(seed % 100, 2, 3))
print("clean")
"""
    environment = os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    ran = subprocess.run(
        [sys.executable, "-S", "-c", program], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert ran.stdout == "clean\n", ran.stderr[-4000:]


@pytest.mark.slow
def test_the_stub_says_what_the_module_has() -> None:
    """Signatures aside, which compiled functions lack."""
    command = [sys.executable, "-m", "mypy.stubtest", "galvatron_dp_core", "--concise"]
    environment = os.environ | {"MYPYPATH": str(ENGINE)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert not ran.stderr and [line for line in ran.stdout.splitlines() if "metaclass differs" not in line] == []


def test_control_c_ends_a_search() -> None:
    reported_s: list[float] = []

    def interrupt() -> None:
        reported_s.append(time.process_time())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            galvatron_dp_core.Pipeline(**wide()).solve(math.inf, 10**9)
    assert time.process_time() - reported_s[0] < PROMPT_S


def test_another_thread_runs_meanwhile_and_can_cancel() -> None:
    cancel, failures = galvatron_dp_core.Cancel(), []

    def work() -> None:
        try:
            while True:
                galvatron_dp_core.Pipeline(**wide()).solve(math.inf, 10**9, cancel)
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)  # this returns while the other thread searches: the interpreter is not locked
    assert thread.is_alive()
    cancel.cancel()
    thread.join(60)
    assert failures == ["the search was cancelled"]


def test_a_pipeline_serves_many_threads() -> None:
    seeds = [seed for seed in range(60) if not math.isinf(galvatron_dp_core.Pipeline(**tables(seed)).bound())][:20]
    for seed in seeds:
        alone = galvatron_dp_core.Pipeline(**tables(seed)).solve(math.inf, 10**9)
        shared = galvatron_dp_core.Pipeline(**tables(seed))
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(shared.solve, math.inf, 10**9) for _ in range(4)]
            bounds = [pool.submit(shared.tight_bound, math.inf) for _ in range(4)]
            assert [job.result(60) for job in jobs] == [alone] * 4, seed
            assert all(bound.result(60) <= alone[0] * (1 + 1e-12) for bound in bounds), seed


def wide(micro_batches: int = 240) -> dict[str, Any]:
    """A pipeline of 40 layouts between which changes cost next to nothing: 2^40 sets of them may win."""
    random, layouts, stages = np.random.default_rng(0), 40, 2
    place = random.random(layouts + 1) * 1e-9
    distance = np.abs(place[:, None] - place[None])[..., None] * np.array([1.0, 2.0])
    ways = np.broadcast_to(distance[layouts, :layouts], (2, layouts, 2))
    states = 100 * 4 ** (2 * random.random(layouts * 8) - 1)
    forward = (states / 100) ** -0.3 * (1 + 0.3 * random.random(layouts * 8))
    zero = np.zeros(layouts * 8)
    strategies = np.stack([forward, 2 * forward, zero, states, *[zero] * 5], axis=1)
    prices = {"change": distance[:layouts, :layouts], **dict.fromkeys(("enter", "leave"), ways)}
    prices |= dict.fromkeys(("vocab_enter", "vocab_leave"), ways[:1])
    sizes = {"layers": np.array([32]), **lists(Schedule.ONE_F_ONE_B, stages, micro_batches), "budget_mib": 500.0}
    return free(strategies, np.arange(layouts * 8) % layouts, np.zeros(layouts, dtype=int), **prices, **sizes)


def test_a_space_that_is_too_wide_leaves_a_gap() -> None:
    time_ms, proven_ms, _, _, choice = galvatron_dp_core.Pipeline(**wide()).solve(math.inf, 10**6)
    assert len(choice) == 32
    assert 0 < proven_ms < time_ms < 1.2 * proven_ms


def test_what_fits_has_a_plan_however_little_was_tried() -> None:
    """The one of least memory, at worst."""
    pipeline = galvatron_dp_core.Pipeline(**wide())
    time_ms, proven_ms, vocab, division, choice = pipeline.solve(math.inf, 0)
    assert vocab == 0 and sum(division) == len(choice) == 32
    assert 0 < pipeline.bound() <= proven_ms < time_ms < math.inf
    states, ends = wide()["strategies"][choice, 3], np.cumsum([0, *division])
    assert max(states[first:end].sum() for first, end in itertools.pairwise(ends)) <= 500


def hostile(vocabs: int, strategies: int, layers: list[int], stages: int) -> dict[str, Any]:
    """Hardly any two of all numbers are equal, working memory neither: as many levels of it as strategies."""
    random, layouts = np.random.default_rng(0), 40
    place = random.random(layouts + 1) * 1e-9
    distance = np.abs(place[:, None] - place[None])[..., None] * np.array([1.0, 2.0])
    ways = np.broadcast_to(distance[layouts, :layouts], (2, layouts, 2))
    numbers = random.random((strategies, 9)) * [1, 2, 5, 100, 50, 300, 0, 0, 0]
    numbers[:, 3] = 0.1 / numbers[:, 0]
    prices = {"change": distance[:layouts, :layouts], **dict.fromkeys(("enter", "leave"), ways)}
    prices |= dict.fromkeys(("vocab_enter", "vocab_leave"), np.broadcast_to(ways[:1], (vocabs, layouts, 2)))
    sizes = {"layers": np.array(layers), "vocabs": random.random((vocabs, 2, 9))}
    sizes |= {**lists(Schedule.ONE_F_ONE_B, stages, 64), "budget_mib": 1500.0 * sum(layers) / stages}
    types = np.arange(layouts) * len(layers) // layouts
    return free(numbers, np.arange(strategies) % layouts, types, **prices, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [(2000, 2000, [80], 8), (1, 2000, [100_000], 50), (4, 2000, [1250] * 8, 100), (1, 200, [2000], 2000)]
)
def test_every_search_ends(size: tuple[int, int, list[int], int]) -> None:
    """With a plan and a bound, for any numbers, in the time that its effort allows, and in 500 MiB."""
    ctypes.CDLL(None).malloc_trim(0)  # memory of an earlier search would be used again, and not be counted
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts again (proc(5))
    started, before = time.process_time(), resident_mib("VmRSS")
    time_ms, proven_ms, _, _, choice = galvatron_dp_core.Pipeline(**hostile(*size)).solve(math.inf, 10**6)
    assert len(choice) == sum(size[2])
    assert 0 < proven_ms <= time_ms < math.inf
    assert time.process_time() - started < 120  # mostly some seconds
    assert resident_mib("VmHWM") < before + 500


def resident_mib(name: str) -> int:
    """Memory of this process, now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(name))


def test_what_was_cancelled_leaves_no_wrong_answer_behind() -> None:
    """Part of the work is remembered; none of it half done."""
    pipeline, cancel, reported_s = galvatron_dp_core.Pipeline(**wide()), galvatron_dp_core.Cancel(), list[float]()
    threading.Timer(0.05, lambda: (reported_s.append(time.process_time()), cancel.cancel())).start()
    with pytest.raises(RuntimeError, match="cancelled"):
        while True:
            galvatron_dp_core.Pipeline.tight_bound(pipeline, math.inf, cancel)
    assert time.process_time() - reported_s[0] < PROMPT_S
    assert pipeline.solve(math.inf, 10**6)[0] < math.inf


def held(stages: int) -> np.ndarray:
    """One micro-batch in flight in each stage."""
    return np.array([(stage, 1) for stage in range(stages)])


def test_lists_in_which_stages_wait_for_each_other_are_refused() -> None:
    """The first stage wants its gradient before it sends the input of the second one's pass."""
    forward, backward = (0, 0, 0), (1, 0, 0)
    passes, runs = np.array([backward, forward, forward, backward]), np.array([(0, 2, 1, 1), (1, 2, 1, 1)])
    with pytest.raises(ValueError, match="passes: stages wait for each other in a circle"):
        galvatron_dp_core.step_ms(passes, runs, 1, np.ones((2, 2)), np.ones(2), np.ones(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": np.array([], dtype=int)}, "layers: give the number"),
        ({"layers": np.array([0])}, "layers: at least 1"),
        ({"layers": np.ones(9, dtype=int)}, "8 types at most"),
        ({"in_flight": held(1000)}, "fewer layers than stages"),
        ({"layers": np.array([100_000]), "in_flight": held(51)}, "layers times stages"),
        ({"vocabs": np.zeros((2001, 2, 9))}, "vocabs: more than 2000"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"micro_batches": 10**6}, "passes: not every micro-batch"),
        ({"passes": np.zeros((0, 3)), "runs": np.zeros((0, 4))}, "passes: not every micro-batch"),
        ({"passes": np.zeros((2, 2))}, "passes: give kind, chunk"),
        ({"passes": np.full((2, 3), 2)}, "passes: kind or chunk"),
        ({"passes": np.array([[0, -1, 0]])}, "passes: kind or chunk"),
        ({"passes": np.array([[0, 2**62, 0]])}, "passes: kind or chunk"),
        ({"passes": np.array([[0, 0, 1], [1, 0, 0]])}, "passes: micro-batches of a stage"),
        ({"runs": np.array([0, 2, 1, 1])}, "runs: give stage"),
        ({"runs": np.array([[1, 2, 1, 1]])}, "runs: stages"),
        ({"runs": np.array([[0, 2**40, 1, 1]])}, "runs: passes or times"),
        ({"runs": np.array([[0, 2, -1, 1]])}, "runs: passes or times"),
        ({"runs": np.array([[0, 2, 2, 0]]), "micro_batches": 2}, "runs: step is not"),
        ({"micro_batches": 2**31 - 1}, "micro_batches: give 1 to 1000000"),
        ({"layers": np.array([2**32 + 1])}, "layers: at least 1"),
        ({"strategies": np.zeros((0, 9))}, "strategies: none"),
        ({"strategies": np.zeros((2, 5))}, "strategies: has shape"),
        ({"strategies": np.full((1, 9), np.nan)}, "strategies: holds NaN"),
        ({"strategies": np.full((1, 9), np.inf)}, "strategies: holds an infinite"),
        ({"layouts": np.array([9])}, "layouts: out of range"),
        ({"layouts": np.array([0, 0, 0, 0])}, "layouts: one a strategy"),
        ({"types": np.zeros(65, dtype=int)}, "types: no layouts"),
        ({"types": np.array([1])}, "types: of each layout, rising"),
        ({"enter": np.zeros((2, 65, 2))}, "enter: has shape"),
        ({"vocabs": np.zeros((1, 9))}, "vocabs: has shape"),
        ({"middle": np.zeros(5)}, "middle: has shape"),
        ({"in_flight": np.array([1])}, "in_flight: give stage"),
        ({"in_flight": np.array([[0, 1, 1]])}, "in_flight: not as many chunks"),
        ({"in_flight": np.array([[0, 1], [0, 1]])}, "in_flight: a stage is missing"),
        ({"in_flight": np.array([[0, 0]])}, "in_flight: between"),
        ({"budget_mib": float("nan")}, "budget_mib: is NaN"),
        ({"send": np.zeros(7)}, "send: has shape"),
    ],
)
def test_bad_arrays_are_value_errors(change: dict[str, Any], message: str) -> None:
    good = next(
        t for t in map(tables, range(1000)) if len(t["in_flight"]) == len(t["strategies"]) == len(t["types"]) == 1
    )
    with pytest.raises(ValueError, match=message):
        galvatron_dp_core.Pipeline(**good | change)


def test_a_stage_is_left_from_the_layout_of_its_last_type() -> None:
    """The last layer's faster strategy is in a layout from which the way to the LM head costs 5 ms."""
    change, leave = np.zeros((4, 4, 2)), np.zeros((4, 2))
    change[2, 3] = change[3, 2] = leave[2] = 2.5
    numbers = np.zeros((4, 9))
    numbers[:, 0], numbers[:, 3] = [1, 1, 1, 2], 1.0
    others = {"layers": np.array([1, 1]), "change": change, "vocab_leave": leave[None], "budget_mib": 500.0}
    arguments = free(numbers, range(4), [0, 0, 1, 1], **others, **lists(Schedule.ONE_F_ONE_B, 1, 1))
    time_ms, _, _, _, choice = galvatron_dp_core.Pipeline(**arguments).solve(math.inf, 10**6)
    assert time_ms == pytest.approx(3) and choice[1] == 3
