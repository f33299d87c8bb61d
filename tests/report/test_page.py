"""The report's page: one well-formed file without network, that stays readable for a thousand GPUs."""

import json
import os
import re
from copy import copy
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, browser, needs_chromium, with_pictures
from cost_examples import MODEL, example, one_node

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.text import gib
from paddlenlp_galvatron.cost_model import CostModel, StageTimes, derive, timeline
from paddlenlp_galvatron.model.shape import flops_per_token
from paddlenlp_galvatron.options.model_options import Model
from paddlenlp_galvatron.plan import Schedule, load_model, plan_id, read_plan
from paddlenlp_galvatron.plan.schedule import ByKind
from paddlenlp_galvatron.plan.strategy import DataParallel, LayerStrategy, Plan, VocabStrategy
from paddlenlp_galvatron.planner import Need, SearchOptions, SearchResult
from paddlenlp_galvatron.planner import explain as explaining
from paddlenlp_galvatron.planner import question as questions
from paddlenlp_galvatron.planner.explain import Explanation, FrontierPoint, frontier
from paddlenlp_galvatron.planner.explain import explain as find_out
from paddlenlp_galvatron.planner.question import Question
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.profiles.network import Network
from paddlenlp_galvatron.report.difference import differing_fields, differing_layers
from paddlenlp_galvatron.report.explain import printed
from paddlenlp_galvatron.report.page import folded, render, tiles, time_bar
from paddlenlp_galvatron.report.search import summary

LARGEST_BYTES = 3 * 10**6
LONGEST_LOAD_MS = 2000
ALL = "document.querySelectorAll"
VOID = {"meta", "br", "link", "rect"}  # in SVG as the page writes it: closed in themselves


class Tags(HTMLParser):
    """Whether every tag is closed, and what the page names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(page)
    assert not parser.open
    return parser.seen


def question(cost: CostModel, memory_gb: float, batch: int = 32) -> Question:
    options = SearchOptions(
        num_nodes=cost.profiles.num_nodes,
        num_gpus_per_node=cost.profiles.gpus_per_node,
        memory_constraint=memory_gb,
        settle_bsz=batch,
        seq_length=cost.assumed.seq_length,
        mixed_precision=cost.assumed.mixed_precision,
        amp_master_grad=bool(cost.assumed.fp32_gradients),
    )
    return Question(Model(cost.models, cost.assumed.seq_length or 0), options, cost)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    asked = question(one_node(), 1.0)
    return find_out(asked.search().plan, asked)


@pytest.fixture(scope="module")
def real() -> Explanation:
    """A layer-wise plan of a model with a name, by its data sheet."""
    asked = {"memory_constraint": 28, "settle_bsz": 64, "seq_length": 4096, "max_pp_deg": 4, "sp_space": "tp+sp"}
    options = SearchOptions.from_values({**asked, "default_dp_type": "zero2"})
    shape = load_model("qwen2.5-7b")
    cost = derive(shape, load_data_sheet("h100"), 1, 8, options.assumptions, options.cost_options)
    within = Question(Model((shape,), 4096), options, cost)
    return find_out(within.search().plan, within)


def records(plan: Plan, steps: int, step_s: float = 0.5, peak_mib: float = 500.0) -> list[dict]:
    return [
        {
            "step": step,
            "plan": plan_id(plan),
            "step_time_s": step_s + step / 1000,
            "peak_memory_mib": [peak_mib + rank for rank in range(8)],
            **{"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1e3},
        }
        for step in range(steps)
    ]


def test_the_page_is_whole_and_names_nothing_outside(explanation):
    points = frontier(explanation)
    page = render(explanation, points, records(explanation.plan, 30))
    seen = tags(page)
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page)
    assert "default-src 'none'" in page and len(page.encode()) < LARGEST_BYTES
    ids = [at["id"] for _, at in seen if "id" in at]
    assert {"binds", "layers", "memory", "time", "timeline", "what-if", "frontier", "others", "measured"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert all(at.get("aria-label") for tag, at in seen if tag == "svg" or at.get("role") == "img")
    assert ", bound " not in page  # which is known of GPUs
    assert [at["class"] for _, at in seen if "data-chart" in at] == ["chart", "chart"]
    passes = len(explanation.stages) * (2 * explanation.plan.micro_batches + 1)
    assert sum(tag == "rect" for tag, _ in seen) == passes
    for point in points:
        assert f"{point.memory_gb:.4g}" in page
    assert "measured 0.517 s (median)" in page


def test_stages_of_several_chunks_are_reported_as_stages(explanation):
    asked = explanation.question
    plan = replace(
        explanation.plan, stages=(1, 1, 1, 1), chunks=2, layers=(LayerStrategy(2),) * 4, vocab=VocabStrategy(2)
    )
    page = render(replace(explanation, plan=plan, prediction=asked.cost.predict(plan)), [])
    assert f"2 stages of {plan.stage_size} ranks, interleaved 1F1B of 2 chunks a stage" in page
    assert "stage 1, forward 0, chunk 1: " in page


def test_tiles_are_the_prediction(real, explanation):
    shown = {tile.name: tile.value for tile in tiles(real)}
    prediction, gpus = real.prediction, real.plan.world_size
    each = prediction.samples_per_s * 4096 / gpus
    assert shown["tokens/s/GPU"] == f"{each:,.0f}"
    assert shown["MFU"] == f"{each * flops_per_token(real.question.model.shapes[0], 4096) / 989e12:.1%}"
    assert shown["step"] == f"{prediction.time_s:.3g} s" and "pipeline bubble" in shown
    assert "MFU" not in {tile.name for tile in tiles(explanation)}  # of a device that nobody knows


def test_a_bar_of_time_is_the_whole_step(real):
    step_ms = 1000 * real.prediction.time_s
    for stage in real.stages:
        solid, hidden = time_bar(stage, step_ms)
        assert sum(one.share for one in solid) == pytest.approx(1, abs=1e-6)
        assert sum(one.ms for one in hidden) == pytest.approx(sum(stage.hidden_ms.values()), abs=0.2)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_a_folded_time_line_keeps_both_ends_and_its_order(real, schedule):
    plan = replace(real.plan, schedule=schedule, global_batch=512, micro_batches=64, stages=(14, 14))
    times = StageTimes(ByKind((3.0, 3.0), (5.0, 5.0)), (1.0, 2.0), (0.1,))
    spans = timeline(schedule, times, 64)
    step_ms = max(span.stop_ms for span in spans)
    drawn = folded(spans, plan, step_ms)
    assert drawn.folded > 40 and len(drawn.spans) < 0.6 * len(spans)
    assert drawn.drawn_ms + drawn.skipped_ms == pytest.approx(step_ms)
    assert max(span.stop_ms for span in drawn.spans) == pytest.approx(drawn.drawn_ms)
    fold_end = drawn.fold_ms + drawn.gap_ms
    assert all(span.stop_ms <= drawn.fold_ms + 1e-9 or span.start_ms >= fold_end - 1e-9 for span in drawn.spans)
    for stage in range(2):
        mine = sorted((span for span in drawn.spans if span.stage == stage), key=lambda span: span.start_ms)
        assert all(one.stop_ms <= after.start_ms + 1e-9 for one, after in pairwise(mine))
    few = folded(timeline(schedule, times, 4), replace(plan, micro_batches=4), 1.0)
    assert not few.folded and len(few.spans) == 2 * (2 * 4 + 1)


def test_gains_of_a_plan_that_is_not_the_best_are_distinguished_from_the_best_ones(explanation):
    """Else everything that is asked seems to help, as each answer is a search."""
    slow = find_out(replace(explanation.plan, layers=(LayerStrategy(8, recompute=True),) * 4), explanation.question)
    assert explanation.faster is None and slow.faster is slow.searched.best
    reported, row = text_of(slow), f"the best plan as things are {slow.faster.time_s:.4g} "
    assert row in reported and '<th scope="row">the best plan</th>' in render(slow, [])
    best_link = min((one for one in slow.what_ifs if one.name.startswith("links")), key=lambda one: one.time_s)
    assert f"the best plan's step takes {1 - best_link.time_s / slow.faster.time_s:.1%} less" in reported
    assert "the best plan as things are" not in text_of(explanation)


def text_of(explanation: Explanation) -> str:
    """The printed text, one blank between words."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(*printed(explanation), sep="\n")
    return " ".join(capture.get().split())


def test_memory_is_drawn_against_budget_and_bound(real):
    page = render(real, [])
    (stage, *_), reserve = real.prediction.stages, real.question.cost.reserve_of(real.plan)
    memory = stage.memory
    bound_mib = reserve.bound_mib(memory.total_mib - memory.context_mib, memory.working_mib)
    assert f"bound {gib(bound_mib)} GiB" in page and f"budget, {gib(real.budget_mib)} GiB" in page


def test_the_frontier_is_what_searches_answer(explanation):
    points = frontier(explanation)
    times = [point.time_s for point in points if point.time_s is not None]
    assert times == sorted(times, reverse=True) and len(times) > 3
    mine = next(point for point in points if point.memory_gb == explanation.question.options.memory_constraint)
    assert mine.time_s == pytest.approx(explanation.prediction.time_s)


def test_names_from_outside_are_text(explanation):
    shape = replace(MODEL, name="<script>alert(1)</script>")
    asked = replace(explanation.question, model=Model((shape,), 4096))
    page = render(replace(explanation, question=asked), [])
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


@pytest.fixture(scope="module")
def large(explanation) -> Explanation:
    """126 layers on 1,024 GPUs in 16 stages."""
    model = replace(MODEL, layers=126)
    cost = example(num_nodes=256, model=model)
    layers = tuple(LayerStrategy(8, recompute=layer % 3 == 0, dp_type=DataParallel.ZERO3) for layer in range(126))
    plan = Plan(1024, 512, 64, (8,) * 14 + (7,) * 2, layers, VocabStrategy(8), assumed=cost.assumed)
    asked = question(cost, 80.0, 512)
    return replace(explanation, **vars(asked.facts_of(plan)), question=asked)


def test_a_large_plan_stays_small(large):
    console = Console(width=80)
    with console.capture() as capture:
        console.print(*printed(large), sep="\n", soft_wrap=True)
    tables = capture.get().split("time of a step")[1].split("bottlenecks")[0]
    assert "stage 15" in tables and "…" not in tables
    page = render(large, [])
    tags(page)
    assert len(page.encode()) < LARGEST_BYTES and page.count('<th scope="row">stage') == 16


@needs_chromium
def test_it_works_in_a_browser(real, large, tmp_path):
    """Opens at once and without an error, names the element under pointer and focus, follows the reader's theme and the
    button, and is no wider than a phone: a small plan with a log, and one of 126 layers on 1,024 GPUs."""
    pages = {
        "small": render(real, frontier(real), records(real.plan, 300, real.prediction.time_s, 20_000.0)),
        "large": render(large, [FrontierPoint(gb, 9.0 - gb / 20, 9.0 - gb / 20) for gb in (40.0, 60.0, 80.0, 100.0)]),
    }
    with browser() as opened:
        for name, page in pages.items():
            (tmp_path / f"{name}.html").write_text(page)
            address = f"file://{tmp_path}/{name}.html"
            for _ in range(10):  # the machine may be busy
                opened.open(address)
                if (loaded_ms := opened.loaded_ms) < LONGEST_LOAD_MS:
                    break
            assert loaded_ms < LONGEST_LOAD_MS
            tip, back = "document.getElementById('tip').textContent", "getComputedStyle(document.body).backgroundColor"
            for element in ("td[data-tip]", ".bar", "rect"):
                opened.point_at(element)
                opened.wait(f"{tip} === document.querySelector({element!r}).dataset.tip")
            opened.key("Escape")
            opened.wait(f"{tip} === ''")
            opened.point_at("h1")
            opened.value("document.getElementById('theme').focus()")
            opened.key("Tab")
            opened.wait(f"{tip} === document.querySelector('[data-tip]').dataset.tip")
            light, dark = ({}, {})
            for theme, seen in (("light", light), ("dark", dark)):
                opened.prefer(theme)
                seen["back"], seen["text"] = opened.value(back), opened.value("getComputedStyle(document.body).color")
            assert (light["back"], dark["back"]) == ("rgb(255, 255, 255)", "rgb(22, 24, 29)")
            assert light["text"] != dark["text"]
            for expected in (light, dark):  # the button wins over the system, and goes back
                opened.click("#theme")
                opened.wait(f"{back} === {expected['back']!r}")
            charts = opened.value(
                "[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('canvas').length)"
            )
            assert charts == ([1, 1] if name == "small" else [1])
            cut = f"[...{ALL}('.grid td')].filter(cell => cell.scrollWidth > cell.clientWidth).length"
            assert opened.value(cut) == 0  # every name of layers is whole
            opened.open(address)
            opened.prefer("light")
            with_pictures(opened.screenshot, "report.png" if name == "small" else "report_1024_gpus.png")
            opened.prefer("dark")
            opened.value("document.getElementById('memory').scrollIntoView()")
            if name == "small":
                with_pictures(opened.screenshot, "report_dark.png")
            opened.window(PHONE)
            opened.open(address)
            assert opened.overflow <= 0
            assert (
                opened.value("Math.min(...[...document.querySelectorAll('.lanes svg, .bar')].map(e => e.clientHeight))")
                >= 20
            )
            if name == "small":
                with_pictures(opened.screenshot, "report_phone.png")
            opened.window(DESKTOP)
        assert not opened.errors


def test_the_command_writes_it(galvatron, tmp_path, monkeypatch):
    from cli.test_search import OPTIONS, words, write_profiles

    monkeypatch.chdir(tmp_path)
    write_profiles(tmp_path)
    assert galvatron(*words(**OPTIONS, output_config_path="plan.json")).code == 0
    plan = read_plan("plan.json", 8)
    log = "".join(json.dumps(record) + "\n" for record in records(plan, 8))
    Path("log.jsonl").write_text(log)
    ran = galvatron("report", "plan.json", "--log", "log.jsonl", "-o", "page.html")
    assert ran.code == 0 and "Predicted and measured" in Path("page.html").read_text()
    Path("other.jsonl").write_text(log.replace(plan_id(plan), "another"))
    assert "holds no step of this plan" in galvatron("report", "plan.json", "--log", "other.jsonl").err
    lines = log.splitlines(keepends=True)
    Path("cut.jsonl").write_text(log + lines[-1][:50])  # by a kill; training leaves the line out, too
    assert galvatron("report", "plan.json", "--log", "cut.jsonl", "-o", "cut.html").code == 0
    pages = [re.sub("; galvatron report .*", "", Path(name).read_text()) for name in ("cut.html", "page.html")]
    assert pages[0] == pages[1]
    odd = [lines[0].replace('"step": 0', f'"step": {value}') for value in ("1" + "0" * 400, "1e400", "-1", '"x"')]
    times = ("0", "-1", "NaN", "Infinity", '"x"', "1e300", "5e-324")
    odd += [lines[0].replace('"step_time_s": 0.5', f'"step_time_s": {value}') for value in times]
    odd += [lines[0].replace("[500.0", f"[{value}") for value in ("NaN", '"x"', "null", "[]", "-1")]
    odd += [lines[0].replace("[500.0, ", "[")]  # of another number of ranks
    for broken in (*odd, "", "{}", "[1]", "{", '{"step": 1, "step_time_s": null, "peak_memory_mib": []}\n'):
        Path("broken.jsonl").write_text(broken)
        ran = galvatron("report", "plan.json", "--log", "broken.jsonl", "-o", "none.html")
        assert ran.code == 2 and "is no train_log.jsonl" in ran.err and not Path("none.html").exists(), broken
    os.mkfifo("pipe.jsonl")
    for none in ("pipe.jsonl", "missing.jsonl", "."):
        assert galvatron("report", "plan.json", "--log", none, "-o", "none.html").code == 2


def test_a_page_says_that_it_predicts_of_which_device_and_from_which_plan(galvatron, tmp_path, monkeypatch):
    monkeypatch.setattr(explaining, "SEARCHES_S", 0.0)
    monkeypatch.setattr(explaining, "FRONTIER_S", 0.0)
    monkeypatch.setattr(questions, "LEAST_S", 0.0)
    assert galvatron("search", "qwen2.5-0.5b", "--device", "h100-80gb", "--gpus", 8, "-o", "mine.json").code == 0
    assert galvatron("report", "mine.json", "-o", "page.html").code == 0
    (words,) = re.findall(r'<p id="premises">(.*)</p>', Path("page.html").read_text())
    expected = "Predicted, not measured: prices from a data sheet; plan mine.json; "
    expected += f"{date.today()}; galvatron report --output=page.html --plan=mine.json; assumptions: data sheet: "
    assert words.startswith(f"{expected}device NVIDIA H100-SXM5-80GB, memory 79.1 GiB")


def test_a_page_says_what_of_its_prices_was_measured(explanation):
    assert "prices measured" in render(explanation, [])
    meta = explanation.cost.profiles.network.profile.meta.model_copy(update={"analytic": True})
    network = Network(replace(explanation.cost.profiles.network.profile, meta=meta))
    mixed = copy(explanation.cost)
    mixed.profiles = replace(explanation.cost.profiles, network=network)
    assert "prices of links from a data sheet, others measured" in render(replace(explanation, cost=mixed), [])


LAYERS = (*[LayerStrategy(2)] * 2, *[LayerStrategy(1, context=2)] * 2, *[LayerStrategy(2, ulysses=True)] * 4)
PLAN = Plan(8, 16, 4, (2, 2, 2, 2), LAYERS, chunks=2)


def test_layers_of_several_chunks_stand_in_their_order():
    plain = replace(PLAN, chunks=1, stages=(4, 4))
    assert differing_layers(PLAN, plain) == [
        ("2-3", "stage 1: cp 2, ddp", "stage 0: cp 2, ddp"),
        ("4-5", "stage 0: Ulysses 2, ddp", "stage 1: Ulysses 2, ddp"),
    ]
    assert differing_fields(PLAN, plain) == {
        "layers of each": ("2, 2, 2, 2", "4, 4"),
        "schedule": ("interleaved 1F1B of 2 chunks a stage", "1F1B"),
    }


def test_the_layers_of_a_stage_of_several_chunks_are_one_range_each() -> None:
    cost = example()
    plan = Plan(8, 32, 4, (1, 1, 1, 1), (LayerStrategy(2),) * 4, VocabStrategy(2), chunks=2, assumed=cost.assumed)
    for reported, one in (([[0, 0], [2, 2]], plan), ([[0, 1]], replace(plan, stages=(2, 2), chunks=1))):
        need = replace(Need.of(one, cost), stage=0)
        assert summary(SearchResult(None, 0.0, 0.0, {}, need=need), 0.0, 0.0)["binds"]["layers"] == reported
