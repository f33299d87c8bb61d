"""`galvatron what-if`: access, answers, and the page in a browser."""

import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from browser import DESKTOP, PHONE, browser, needs_chromium, with_pictures

from paddlenlp_galvatron.cli.what_if import WAITING
from paddlenlp_galvatron.planner import form as forms
from paddlenlp_galvatron.planner.form import Form
from paddlenlp_galvatron.report.page import LABELS, failed, seconds, what_if_page

from .test_search import OPTIONS, folder, words, write_profiles  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
WIDE = {"model_size": "llama3-405b", "num_nodes": 128} | {
    "search_options": "--sp_space tp+sp --max_pp_deg 64 --max_tp_deg 64 --max_cp_deg 8 --recompute_parts 1"
}
WAIT_S = 60


@dataclass
class Served:
    address: str
    process: subprocess.Popen[str]

    def get(self, path: str = "", host: str | None = None, method: str = "GET", **query: Any) -> tuple[int, str, Any]:
        """(status, content, headers) of a page under the token, or of one at a path that begins with /."""
        at = urlsplit(self.address)
        connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=WAIT_S)
        where = path if path.startswith("/") else at.path + path
        where += f"?{urlencode(query)}" if query else ""
        connection.request(method, where, headers={"Host": host or at.netloc})
        reply = connection.getresponse()
        found = reply.status, reply.read().decode(), reply.headers
        connection.close()
        return found

    def answer(self, **query: Any) -> tuple[dict[str, str], str]:
        """(faults by field, the drawn answer)."""
        status, content, _ = self.get("answer", **query)
        assert status == 200
        reported = json.loads(content)
        return reported["faults"], reported["html"]

    def plan(self, **query: Any) -> dict[str, Any]:
        return json.loads(self.get("plan.json", **query)[1])


@contextmanager
def serving(*words: str, show: Mapping[str, str] | None = None) -> Iterator[Served]:
    """`show`: the environment in which a browser is opened."""
    line = [
        sys.executable,
        "-m",
        "paddlenlp_galvatron.cli.main",
        "what-if",
        *([] if show else ["--no_browser"]),
        *words,
    ]
    environment = os.environ | (show or {})
    process = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield Served(process.stdout.readline().strip(), process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("qwen2.5-7b", "--num_gpus_per_node", "8") as server:
        yield server


def test_only_who_has_the_address_is_answered(served):
    at = urlsplit(served.address)
    assert at.hostname == "127.0.0.1" and re.fullmatch(r"/[\w-]{32}/", at.path)
    assert served.get()[0] == 200
    token = at.path[1:-1]
    for path in ("/", "/answer", "/plan.json", f"/{token[:-1]}/", f"/{token}x/", "//", f"/x/{token}/", "//[", "/%ff"):
        status, content, _ = served.get(path)
        assert status == 403 and "<" not in content, path
    assert served.get(at.path[:-1])[0] == served.get("../secret")[0] == served.get("page.py")[0] == 404
    for host in ("example.com", f"example.com:{at.port}", f"127.0.0.1.example.com:{at.port}", ""):
        assert served.get(host=host or " ")[0] == 403, host
    assert served.get(host=f"localhost:{at.port}")[0] == 200
    assert served.get(method="POST")[0] == 501
    assert served.get("answer", x="y" * 70_000)[0] == 414
    with pytest.raises(OSError):  # no other address of this machine
        socket.create_connection((socket.gethostbyname(socket.gethostname()), at.port), timeout=5).close()
        assert socket.gethostbyname(socket.gethostname()).startswith("127.")
        raise OSError
    headers = served.get()[2]
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"


def test_the_page_names_nothing_outside(served):
    page = served.get()[1]
    assert not re.search(r"url\(|@import|https?://", page)
    assert set(re.findall(r'(?:src|href)="([^"?]*)', page)) == {"data:,", "page.js", "what_if.js", "plan.json"}


def test_an_answer_is_the_plan_of_the_commands_that_it_shows(served, galvatron, tmp_path):
    query = {"model_size": "qwen2.5-7b", "num_nodes": 2, "memory_constraint": 36, "global_train_batch_size": 32}
    query |= {"search_options": "--default_dp_type zero2 --max_pp_deg 4"}
    faults, shown = served.answer(**query)
    assert not faults
    lines = re.search(r"<pre>(.*?)</pre>", shown, re.DOTALL)[1].strip().splitlines()
    assert [line.split()[1] for line in lines] == ["search"]
    for line in lines:
        assert galvatron(*line.split()[1:]).code == 0
    mine, its = served.plan(**query), json.loads(Path("plan.json").read_text())
    assert f"<b>{seconds(its['galvatron']['predicted']['time_s'])}</b>" in shown
    its_own = mine["galvatron"].pop("searched_from"), its["galvatron"].pop("searched_from")
    assert mine == its
    assert its_own[0]["model_options"] == its_own[1]["model_options"]
    assert its_own[0]["options"]["device"] == "h100-80gb"
    assert mine["galvatron"]["predicted"]["time_s"] != served.plan()["galvatron"]["predicted"]["time_s"]
    Path("saved.json").write_text(json.dumps(mine | {"galvatron": mine["galvatron"] | {"searched_from": its_own[0]}}))
    reported = galvatron("explain", "saved.json", "--json")
    assert json.loads(reported.out)["time_s"] == pytest.approx(mine["galvatron"]["predicted"]["time_s"])


def test_given_profiles_are_searched(folder, galvatron):  # noqa: F811
    assert galvatron(*words(**OPTIONS, output_config_path="plan.json")).code == 0
    cluster = ("--num_nodes", "2", "--num_gpus_per_node", "4", "--seq_length", "512", "--memory_constraint", "8")
    given = ("example.json", "--profiles", "configs", "--global_train_batch_size", "32")
    with serving(*given, *cluster) as server:
        mine, its = server.plan(), json.loads(Path("plan.json").read_text())
        for plan in (mine, its):
            plan["galvatron"]["searched_from"].pop("options")
            plan["galvatron"]["searched_from"].pop("model_options")
        assert mine == its
        assert "galvatron profile" not in server.answer()[1]


def test_bad_values_say_why_beside_their_field(served):
    wrong = {
        "model_size": "no-such-model",
        "seq_length": "0",
        "global_train_batch_size": "many",
        "device": "no-such-device",
        "num_nodes": "-1",
        "num_gpus_per_node": "1.5",
        "memory_constraint": "nan",
        "time_limit": "0",
        "search_options": "--max_tp_deg x",
        "profiles": "no-such-folder",
    }
    for name, value in wrong.items():
        faults, shown = served.answer(**{name: value})
        assert list(faults) == [name] and len(faults[name]) > 15 and not shown, (name, faults)
    assert set(wrong) == set(LABELS) == set(Form.model_fields)
    for more in ("--settle_bsz 8", "settle_bsz=8", "settle_chunk 4", "--no_such_option", "'"):
        assert list(served.answer(search_options=more)[0]) == ["search_options"]
    assert "positions" in served.answer(seq_length=10**6)[0]["seq_length"]
    faults, _ = served.answer(model_size="llama2-70b")
    assert "GiB of it model states" in faults["memory_constraint"] and faults["num_nodes"] == "2 nodes would do"
    odd = {"global_train_batch_size": 3, "search_options": "max_tp_deg=1 max_pp_deg=1"}
    assert "evenly" in served.answer(**odd)[0]["global_train_batch_size"]
    assert list(served.answer(colour="red")[0]) == [""]
    name = '"><script>alert(1)</script>'
    page = served.get(model_size=name)[1]
    assert "<script>alert" not in page and "&lt;script&gt;" in page
    assert served.get("plan.json", model_size=name)[0] == 400


def test_a_wide_search_is_stopped_and_says_so():
    wide = Form(model_size="llama3-70b", num_nodes=16, global_train_batch_size=512, time_limit=1)
    more = {"max_tp_deg": 64, "max_cp_deg": 8, "recompute_parts": True, "sp_space": "tp+sp"}
    began = time.process_time()
    reported = forms.answer(wide, more)
    assert time.process_time() - began < 10  # to its end it takes minutes
    assert reported.result.given_up
    shown = what_if_page({}, reported, "")
    if reported.result.best:
        assert "The search ran out of time" in shown and " % faster may exist" in shown
    else:
        assert failed(reported) and "no plan was found in 1 s" in shown


@pytest.mark.parametrize("busy", [False, True])
def test_ctrl_c_ends_it_at_once(busy):
    with serving() as server:
        if busy:  # in the midst of a long search
            at = urlsplit(server.address)
            connection = ask(server, **WIDE, global_train_batch_size=4096)
            time.sleep(0.7)
            with socket.create_connection((str(at.hostname), int(at.port or 0))) as gone:  # a browser that is closed
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                gone.sendall(f"GET {at.path}page.js HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
            time.sleep(0.2)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        _, err = server.process.communicate(timeout=WAIT_S)
        assert server.process.returncode == 130 and err == "interrupted\n"
        assert time.monotonic() - start < 30  # at once, where the machine is not busy
        if busy:
            connection.close()


def ask(server: Served, **query: Any) -> socket.socket:
    """A connection that has asked, as a page does."""
    at = urlsplit(server.address)
    connection = socket.create_connection((str(at.hostname), int(at.port or 0)), WAIT_S)
    connection.sendall(f"GET {at.path}answer?{urlencode(query)} HTTP/1.0\r\nHost: {at.netloc}\r\n\r\n".encode())
    return connection


def used_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]  # proc(5)
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_what_nobody_waits_for_is_not_searched():
    """Each of these would take ten seconds: a page that is loaded again, again and again."""
    with serving() as server:
        for number in range(8):
            ask(server, **WIDE, global_train_batch_size=4096 + 64 * number).close()
        faults, _ = server.answer(model_size="llama3.2-1b")
        assert not faults and used_s(server.process.pid) < 30


def test_few_questions_wait():
    with serving() as server:
        waiting = [ask(server, **WIDE) for _ in range(WAITING + 1)]
        deadline = time.monotonic() + WAIT_S
        while True:
            with ask(server, model_size="llama3.2-1b") as one:
                one.settimeout(1)
                try:
                    stated = b"".join(iter(lambda: one.recv(10_000), b""))
                    break
                except TimeoutError:  # the first has not been taken yet, or another has been
                    assert time.monotonic() < deadline
                    waiting.append(ask(server, **WIDE))
        assert b"too many questions wait" in stated
        for one in waiting:
            one.close()
        while server.answer(model_size="llama3.2-1b")[0]:  # until those that have gone are left out
            assert time.monotonic() < deadline


def test_the_token_is_on_no_command_line(tmp_path):
    seen = tmp_path / "seen"
    (tmp_path / "browser").write_text(
        f'#!/bin/sh\nfile=${{1#file://}}\n{{ echo "$@"; stat -c %a "${{file%/*}}"; cat "$file"; }} > {seen}.part\n'
        f"mv {seen}.part {seen}\n"
    )
    (tmp_path / "browser").chmod(0o755)
    shown = {"BROWSER": f"{tmp_path}/browser %s", "DISPLAY": ":0", "TMPDIR": str(tmp_path)}
    with serving(show=shown) as server:
        deadline = time.monotonic() + WAIT_S
        while not seen.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        line, mode, page, *_ = seen.read_text().splitlines()
        assert urlsplit(server.address).path.strip("/") not in line and line.startswith("file:///") and mode == "700"
        assert f'content="0; url={server.address}"' in page
        server.process.send_signal(signal.SIGINT)
        server.process.communicate(timeout=WAIT_S)
    assert not list(tmp_path.glob("galvatron-*"))


def test_what_cannot_be_served_is_a_line(galvatron):
    wrong = {"model_size": "x", "device": "x", "search_options": "x=1", "port": "0", "num_nodes": "x", "profiles": "x"}
    for name, value in wrong.items():
        ran = galvatron("what-if", f"--{name}", value)
        assert ran.code == 2 and all(line.startswith(f"error: {name}: ") for line in ran.err.splitlines()), ran.err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = galvatron("what-if", "--port", taken.getsockname()[1])
        assert ran.code == 2 and "cannot be listened on" in ran.err


@needs_chromium
def test_the_page_answers_every_change(served):
    def shown(text: str) -> str:
        return f"document.getElementById('answer').textContent.includes({text!r})"

    with browser() as page:
        page.open(served.address)
        assert page.value(shown("qwen2.5-7b on 8 GPUs"))
        before = page.value("document.querySelector('.tiles b').textContent")
        page.fill("#memory_constraint", "30")
        page.wait(shown("of 30 GiB"))
        assert page.value("document.querySelector('.tiles b').textContent") != before
        page.fill("#num_nodes", "2")
        page.wait(shown("on 16 GPUs"))
        page.wait("document.getElementById('change').textContent.endsWith('tokens/s against the previous answer')")
        page.fill("#num_nodes", "x")
        page.wait("document.getElementById('why-num_nodes').textContent.includes('whole number')")
        assert page.value("document.getElementById('num_nodes').ariaInvalid") == "true"
        assert page.value("document.getElementById('answer').className") == "old"
        page.fill("#num_nodes", "1")
        page.wait(f"{shown('on 8 GPUs')} && !document.querySelector('.why').textContent")
        assert page.value("document.getElementById('answer').className") == ""
        page.click("#command summary")
        page.wait("document.getElementById('command').open")
        assert page.value(shown("--memory_constraint 30"))
        page.fill("#seq_length", "2048")
        page.wait(shown("sequence length 2048"))
        assert page.value("document.getElementById('command').open")  # as it was
        fetched = page.value("fetch(document.getElementById('export').href).then(reply => reply.json())")
        assert fetched["galvatron"]["assumed"]["seq_length"] == 2048
        tip = "document.getElementById('tip').textContent"
        page.point_at("#answer td[data-tip]")
        page.wait(f"{tip}.startsWith('embedding')")
        for theme in ("light", "dark"):
            page.prefer(theme)
            page.point_at("h1")
            if theme == "light":
                with_pictures(page.screenshot, "what_if.png")
        back = "getComputedStyle(document.body).backgroundColor"
        assert page.value(back) == "rgb(22, 24, 29)"
        page.click("#theme")
        assert page.value(back) == "rgb(255, 255, 255)"
        page.window(PHONE)
        assert page.overflow <= 0
        page.window(DESKTOP)
        page.open(page.value("location.href"))  # as it was left
        assert (
            page.value(shown("sequence length 2048"))
            and page.value("document.getElementById('memory_constraint').value") == "30"
        )
        page.fill("#memory_constraint", "79")
        page.fill("#num_nodes", "8")  # on two, ZeRO-3 is faster than expert parallelism
        choose = "e.value = 'qwen3-30b-a3b'; e.dispatchEvent(new Event('input', {bubbles: true}))"
        page.value(f"(e => {{ {choose}; }})(document.getElementById('model_size'))")
        page.wait(f"{shown('qwen3-30b-a3b on 64 GPUs')} && {shown('expert load imbalance: 1.2x for time')}")
        assert page.value(shown("EP communication"))
        page.point_at("#answer td[data-tip*='experts ep']")
        page.wait(f"{tip}.includes('experts ep')")
        page.fill("#search_options", "moe_imbalance=1.7 moe_imbalance_bound=3")
        page.wait(shown("expert load imbalance: 1.7x for time, 3x for memory"))
        page.window(PHONE)
        assert page.overflow <= 0
        assert not page.errors
