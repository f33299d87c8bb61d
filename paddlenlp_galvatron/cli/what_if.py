"""`galvatron what-if`: a local page that shows the best plan while you change model, cluster, budget, batch and
length."""

import html
import json
import os
import secrets
import select
import shlex
import signal
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from paddlenlp_galvatron.base import GalvatronError, UserError, read_json, within
from paddlenlp_galvatron.base.limits import Port
from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.options.group import Options, canonical_options, is_boolean, read_words
from paddlenlp_galvatron.planner.form import SEARCHED, Answer, Form, answer
from paddlenlp_galvatron.report.page import PAGES, failed, faults_of, fragment, what_if_page

from .command import JSON, App, FromFile
from .command import answer as tell

app = App()

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")  # valid Host names of requests; others come from a foreign page
REQUEST_S = 30.0  # a silent browser is disconnected after this time
WAITING = 16  # questions that may wait; a page asks one at a time
LOOK_S = 0.5  # interval at which a search checks that its client still waits
SCRIPTS = ("page.js", "what_if.js")
SAFE: dict[str, str] = read_json(PAGES / "headers.json")
SAVED = {"Content-Disposition": 'attachment; filename="plan.json"'}


class ServeOptions(Options):
    """Options: the address of the page."""

    port: Port | None = None


@app.command(FromFile, ServeOptions, Form, positional={"model_size": "MODEL"}, switches=("no_browser", *JSON))
def what_if(values: dict[str, Any], no_browser: bool, json: bool) -> None:
    """Open a page that shows the best plan as soon as you change model, cluster, memory, batch or length."""
    question = Form.from_values(values)
    work(question)  # an impossible question ends the command
    form = {name: str(value) for name, value in question.model_dump(exclude_none=True, mode="json").items()}
    serve(form, ServeOptions.from_values(values).port or 0, not no_browser, json)


def work(question: Form) -> Answer:
    """Answer a question. Raises UserError that names the fields."""
    notes: list[str] = []
    with within("search_options"):
        more = _more(question.search_options, notes.append)
    result = answer(question, more)
    return replace(result, notes=(*notes, *result.notes))


def _more(text: str, note: Callable[[str], None]) -> dict[str, Any]:
    """Options as `name=value`, or as on a command line. Raises UserError."""
    try:
        words = shlex.split(text)
    except ValueError as error:  # a quotation mark that is not closed
        raise UserError(str(error)) from None
    if words and not words[0].startswith("-"):
        words = [f"--{word}" for word in words]
    pairs, loose = read_words(words, {name: is_boolean(field) for name, field in SEARCHED.items()}, note)
    if loose:
        raise UserError(f"{loose[0]}: is no option; write name=value")
    return dict(pairs)


class _Asked(NamedTuple):
    question: Form
    outcome: Future[Answer]
    connection: socket.socket


class _Abandoned(BaseException):
    """No client waits for the answer any more; ends a search like an interrupt."""


def serve(form: Mapping[str, str], port: int, show: bool, as_json: bool = False) -> None:
    """Answer until Ctrl-C. Threads receive the browser's requests; searches run here, where signals can end them."""
    token = secrets.token_urlsafe(24)
    asked: Queue[_Asked] = Queue(WAITING)
    handler = type("Handler", (_Handler,), {"token": token, "asked": asked, "form": form})
    try:
        server = _Server((ADDRESS, port), handler)
    except OSError as error:
        raise UserError(
            f"port: {port} cannot be listened on: {error.strerror}; leave --port out, or give another"
        ) from None
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://{ADDRESS}:{server.server_port}/{token}/"
    tell(f"{address}\nopens on this machine alone; Ctrl-C ends it", as_json, address=address)
    with _shown(address, show and bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))):
        _answer_all(asked)


@contextmanager
def _shown(address: str, show: bool) -> Iterator[None]:
    """Open the page in a browser through a file that only this user can read, as every user can read a browser's
    command line."""
    with tempfile.TemporaryDirectory(prefix="galvatron-what-if-") as folder:
        if show:
            file = Path(folder, "open.html")
            file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}">\n')
            webbrowser.open(file.as_uri())
        yield


def _answer_all(asked: Queue[_Asked]) -> None:
    current: _Asked | None = None

    def look(*_: object) -> None:
        if current and not current.outcome.done() and _is_gone(current.connection):
            raise _Abandoned

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    try:
        while True:
            try:
                current = asked.get()
                look()
                current.outcome.set_result(work(current.question))
            except _Abandoned:
                if current:
                    current.outcome.set_exception(ConnectionAbortedError("nobody waits"))
            except Exception as error:  # shown on the page
                if current:
                    current.outcome.set_exception(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _is_gone(connection: socket.socket) -> bool:
    """Whether the client has disconnected: the page was closed or reloaded."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLRDHUP)
    except (OSError, ValueError):  # closed here
        return True
    return bool(poll.poll(0))


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the browser has disconnected."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            say(f"error: a request was not answered: {type(error).__name__}: {error}", err=True)


class _Handler(BaseHTTPRequestHandler):
    """Serves pages only under the token and only to requests by a local host name."""

    token: str
    asked: Queue[_Asked]
    form: Mapping[str, str]
    server_version, sys_version, timeout = "galvatron", "", REQUEST_S

    def do_GET(self) -> None:
        where, _, query = self.path.partition("?")
        token, slash, name = where.removeprefix("/").partition("/")
        if (self.headers.get("Host") or "").partition(":")[0] not in HOSTS:
            self._refuse("Host: this page is served to its own machine alone")
        elif not compare_digest(token.encode(), self.token.encode()):
            self._refuse("open the address that galvatron what-if has printed")
        elif not slash:
            self._reply(404, "text/plain", "the address ends with /")
        else:
            self._page(name, query)

    def _page(self, name: str, query: str) -> None:
        form = dict(parse_qsl(query, keep_blank_values=True)) or dict(self.form)
        if name == "":
            outcome: Answer | GalvatronError
            try:
                outcome = self._answer(form)
            except GalvatronError as error:
                outcome = error
            self._reply(200, "text/html", what_if_page(form, outcome, query))
        elif name == "answer":
            faults, shown = {}, ""
            try:
                result = self._answer(form)
                faults = failed(result)
                shown = "" if faults else fragment(result, query)
            except GalvatronError as error:
                faults = faults_of(error)
            self._reply(200, "application/json", json.dumps({"faults": faults, "html": shown}))
        elif name == "plan.json":
            try:
                content = json.dumps(self._answer(form).plan, indent=2) + "\n"
                self._reply(200, "application/json", content, SAVED)
            except GalvatronError as error:
                self._reply(400, "text/plain", str(error))
        elif name in SCRIPTS:
            self._reply(200, "text/javascript", (PAGES / name).read_text())
        else:
            self._reply(404, "text/plain", "no such page")

    def _answer(self, form: Mapping[str, str]) -> Answer:
        """Raises GalvatronError with the faults by field."""
        filled = {name: value.strip() for name, value in form.items() if value.strip()}
        values = canonical_options(filled, Form.model_fields)
        outcome: Future[Answer] = Future()
        try:
            self.asked.put_nowait(_Asked(Form.from_values(values), outcome, self.connection))
        except Full:
            raise GalvatronError("too many questions wait for an answer; close other pages, and ask again") from None
        try:
            return outcome.result()
        except GalvatronError:
            raise
        except Exception as error:
            raise GalvatronError(f"unexpected {type(error).__name__}: {error}; a report is welcome") from error

    def _refuse(self, why: str) -> None:
        self._reply(403, "text/plain", why)

    def _reply(self, code: int, kind: str, content: str, more: Mapping[str, str] = {}) -> None:
        body = content.encode()
        self.send_response(code)
        for name, value in {**SAFE, "Content-Type": f"{kind}; charset=utf-8", **more}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing: a line per request would hide the address."""
