"""The report's page: one well-formed file without network, that stays readable for a thousand GPUs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cost_examples import MODEL, example, one_node

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.cost_model import CostModel
from paddlenlp_galvatron.plan import DataParallel, LayerStrategy, Plan, VocabStrategy
from paddlenlp_galvatron.report.breakdown import breakdown
from paddlenlp_galvatron.report.explain import Explanation, printed
from paddlenlp_galvatron.report.explain import explain as find_out
from paddlenlp_galvatron.report.page import frontier, render
from paddlenlp_galvatron.report.why import Problem
from paddlenlp_galvatron.search import SearchOptions, search

LARGEST_BYTES = 3 * 10**6
VOID = {"meta", "br", "link", "rect", "polyline"}  # in SVG as the page writes it: closed in themselves


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


def problem(cost: CostModel, memory_gb: float, batch: int = 32) -> Problem:
    options = SearchOptions(
        num_nodes=cost.num_nodes,
        num_gpus_per_node=cost.gpus_per_node,
        memory_constraint=memory_gb,
        settle_bsz=batch,
        seq_length=cost.assumed.seq_length,
        mixed_precision=cost.assumed.mixed_precision,
        amp_master_grad=bool(cost.assumed.fp32_gradients),
    )
    return Problem(cost.models, cost, options)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    asked = problem(one_node(), 1.0)
    plan = search(asked.shapes, asked.cost, asked.options).plan
    return find_out(plan, asked)


def records(plan: Plan, steps: int) -> list[dict]:
    return [
        {"step": step, "step_time_s": 0.5 + step / 1000, "peak_memory_mib": [500.0 + rank for rank in range(8)]}
        for step in range(steps)
    ]


def test_the_page_is_whole_and_names_nothing_outside(explanation):
    points = frontier(explanation.problem)
    page = render(explanation, points, records(explanation.plan, 30))
    seen = tags(page)
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page)
    assert "default-src 'none'" in page and len(page.encode()) < LARGEST_BYTES
    ids = [at["id"] for _, at in seen if "id" in at]
    assert {"binds", "layers", "memory", "time", "timeline", "what-if", "frontier", "others", "measured"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert all(at.get("aria-label") for tag, at in seen if tag == "svg" or at.get("role") == "img")
    passes = len(explanation.stages) * (2 * explanation.plan.micro_batches + 1)
    assert sum(tag == "rect" for tag, _ in seen) == passes
    for point in points:
        assert f"{point.memory_gb:.4g}" in page
    assert "measured 0.517 s (median)" in page


def test_the_frontier_is_what_searches_answer(explanation):
    points = frontier(explanation.problem)
    times = [point.time_s for point in points if point.time_s is not None]
    assert times == sorted(times, reverse=True) and len(times) > 3
    mine = next(point for point in points if point.memory_gb == explanation.problem.options.memory_constraint)
    assert mine.time_s == pytest.approx(explanation.prediction.time_s)


def test_names_from_outside_are_text(explanation):
    shape = replace(MODEL, name="<script>alert(1)</script>")
    asked = replace(explanation.problem, shapes=(shape,))
    page = render(replace(explanation, problem=asked), [])
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_a_large_plan_stays_small(explanation):
    """126 layers on 1,024 GPUs in 16 stages."""
    model = replace(MODEL, layers=126)
    cost = example(num_nodes=256, model=model)
    layers = tuple(LayerStrategy(8, recompute=layer % 3 == 0, dp_type=DataParallel.ZERO3) for layer in range(126))
    plan = Plan(1024, 512, 64, (8,) * 14 + (7,) * 2, layers, VocabStrategy(8), assumed=cost.assumed)
    prediction = cost.predict(plan)
    asked = problem(cost, 80.0, 512)
    stages = breakdown(plan, cost, prediction, asked.options.memory_constraint * 1024)
    told = replace(explanation, plan=plan, problem=asked, prediction=prediction, stages=stages)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(*printed(told), sep="\n", soft_wrap=True)
    tables = capture.get().split("time of a step")[1].split("what binds")[0]
    assert "stage 15" in tables and "…" not in tables
    page = render(told, [])
    tags(page)
    assert len(page.encode()) < LARGEST_BYTES and page.count('<th scope="row">stage') == 16


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
def test_it_opens_in_a_browser(explanation, tmp_path):
    """The script runs without an error, hover and focus tell, the theme changes: a probe writes what it saw into the
    page, which the browser prints."""
    probe = """<script>
      const seen = {errors: 0};
      addEventListener("error", () => seen.errors++);
      const cell = document.querySelector("[data-tip]"), tip = document.getElementById("tip");
      cell.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
      seen.hover = tip.textContent === cell.dataset.tip;
      document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"})); seen.left = tip.textContent === "";
      cell.focus(); seen.focus = tip.textContent === cell.dataset.tip;
      const before = getComputedStyle(document.body).backgroundColor;
      document.getElementById("theme").click(); seen.theme = getComputedStyle(document.body).backgroundColor !== before;
      document.body.dataset.seen = JSON.stringify(seen);
    </script></body>"""
    (tmp_path / "page.html").write_text(render(explanation, []).replace("</body>", probe))
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/page.html"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120)
    (seen,) = re.findall(r'data-seen="([^"]*)"', ran.stdout)
    expected = {"errors": 0, "hover": True, "left": True, "focus": True, "theme": True}
    assert json.loads(seen.replace("&quot;", '"')) == expected


def test_the_command_writes_it(explanation, galvatron, tmp_path, monkeypatch):
    from cli.test_search import OPTIONS, words, write_profiles

    monkeypatch.chdir(tmp_path)
    write_profiles(tmp_path)
    assert galvatron(*words(**OPTIONS, output_config_path="plan.json")).code == 0
    log = "".join(json.dumps(record) + "\n" for record in records(explanation.plan, 8))
    Path("log.jsonl").write_text(log)
    ran = galvatron("report", "plan.json", "--log", "log.jsonl", "-o", "page.html")
    assert ran.code == 0 and "Predicted beside measured" in Path("page.html").read_text()
    Path("short.jsonl").write_text(log.replace("[500.0, ", "["))
    assert "7 ranks, the plan of 8" in galvatron("report", "plan.json", "--log", "short.jsonl").err
    for broken in ("{}", "[1]", "{", '{"step": 1, "step_time_s": null, "peak_memory_mib": []}'):
        Path("broken.jsonl").write_text(broken)
        ran = galvatron("report", "plan.json", "--log", "broken.jsonl", "-o", "none.html")
        assert ran.code == 2 and "is no train_log.jsonl" in ran.err and not Path("none.html").exists()
