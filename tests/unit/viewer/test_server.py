from __future__ import annotations

import asyncio
import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rlite.errors import ConfigError
from rlite.viewer.run import open_runs
from rlite.viewer.server import LOOK_EVERY_S, MAX_STREAMS, serve
from rlite.viewer.trace import TraceLog
from tests.recorded_run import Shape, write_run, write_step, write_trace
from tests.view_server import serving

Headers = dict[str, str]


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "live", Shape(steps=2, groups=2, samples=2))


@pytest.fixture(scope="module")
def url(growing: Path) -> Iterator[str]:
    with serving([str(growing)]) as address:
        yield address


def connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1"
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)


def token(url: str) -> Headers:
    return {"X-Token": parse_qs(urlsplit(url).query)["token"][0]}


def get(url: str, path: str, headers: Headers | None = None) -> tuple[int, str, Headers]:
    connection = connect(url)
    connection.request("GET", path, headers=headers or {})
    response = connection.getresponse()
    found = response.status, response.read().decode(), dict(response.getheaders())
    connection.close()
    return found


def test_the_address_opens_the_page_and_hides_the_token(url: str) -> None:
    status, _, headers = get(url, f"/?{urlsplit(url).query}")
    assert (status, headers["Location"]) == (302, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    status, text, headers = get(url, "/", {"Cookie": headers["Set-Cookie"].split(";")[0]})
    assert status == 200
    assert "<title>rlite view</title>" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/main.js", "/events", "/nothing"])
@pytest.mark.parametrize("headers", [{}, {"X-Token": "wrong"}, {"Cookie": "rlite-view=wrong"}, {"X-Token": "\xff"}])
def test_a_wrong_or_missing_token_gets_401(url: str, path: str, headers: Headers) -> None:
    status, text, _ = get(url, path, headers)
    assert status == 401
    assert "token" in json.loads(text)["error"]


def test_the_token_of_the_address_must_be_right(url: str) -> None:
    assert get(url, "/?token=wrong")[0] == 401
    assert get(url, f"/?token={token(url)['X-Token']}x")[0] == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_page_that_rebinds_its_name_to_this_machine_is_refused(url: str, host: str) -> None:
    assert get(url, "/api/runs", {**token(url), "Host": host})[0] == 403


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "[::1]:80"])
def test_a_forwarded_port_of_this_machine_is_served(url: str, host: str) -> None:
    assert get(url, "/api/runs", {**token(url), "Host": host})[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/static/../server.py", "/static/..%2fserver.py", "/static//etc/passwd", "/static/%2e%2e/run.py", "/static/x.js"],
)
def test_no_other_file_is_served(url: str, path: str) -> None:
    assert get(url, path, token(url))[0] == 404


def test_errors_are_told(url: str) -> None:
    assert get(url, "/api/nothing", token(url))[:2] == (404, '{"error": "no question \'nothing\'"}')
    status, text, _ = get(url, "/api/rows?run=0&step=x", token(url))
    assert (status, "expected a whole number" in text) == (400, True)
    assert get(url, "/api/sample?run=0&step=1&group=99&sample=0", token(url))[0] == 404


def test_nothing_can_be_written(url: str) -> None:
    connection = connect(url)
    connection.request("POST", "/api/runs", body=b"x" * 100_000, headers=token(url))
    assert connection.getresponse().status in (404, 405, 413)
    connection.close()


def test_a_page_hears_of_new_steps(url: str, growing: Path) -> None:
    connection = connect(url)
    connection.request("GET", "/events", headers=token(url))
    stream = connection.getresponse()
    assert stream.getheader("Content-Type") == "text/event-stream"
    lines = iter(stream.readline, b"")
    assert next(lines).startswith(b"data:"), "what changed before is told at once"
    write_step(growing, 3, Shape(steps=3, groups=2, samples=2))
    assert next(line for line in lines if line.startswith(b"data:"))
    steps = json.loads(get(url, "/api/runs", token(url))[1])[0]["sources"]["train"]["steps"]
    assert steps == [1, 2, 3]
    connection.close()


def test_growing_trace_is_announced_separately_and_rarely(
    url: str, growing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlite.viewer.server.TRACE_EVERY_S", 2.5 * LOOK_EVERY_S)
    connection = connect(url)
    connection.request("GET", "/events", headers=token(url))
    stream = connection.getresponse()
    lines = iter(stream.readline, b"")
    kinds = (line.split(b": ")[1].strip() for line in lines if line.startswith(b"event: "))
    assert next(kinds) == b"run", "at once"
    times = []
    for steps in (4, 5):
        write_trace(growing / "trace.json", steps)
        assert next(kinds) == b"trace"
        times.append(time.monotonic())
    assert times[1] - times[0] > 1.5 * LOOK_EVERY_S
    connection.close()


def test_a_trace_that_takes_long_to_read_keeps_no_other_page_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write_run(tmp_path / "run", Shape(steps=1, groups=1, samples=1)) / "trace.json"
    begun, may_end, refresh = threading.Event(), threading.Event(), TraceLog.refresh

    def slow_refresh(log: TraceLog) -> Any:
        begun.set()
        assert may_end.wait(60)
        return refresh(log)

    monkeypatch.setattr(TraceLog, "refresh", slow_refresh)
    with serving([str(trace.parent)]) as url:
        page = connect(url)
        page.request("GET", "/api/timeline?run=0", headers=token(url))
        try:
            assert begun.wait(60)
            assert get(url, "/api/overview?run=0", token(url))[0] == 200
        finally:
            may_end.set()
        assert page.getresponse().status == 200
        page.close()


def test_open_pages_are_bounded_and_closed_ones_do_not_count(url: str) -> None:
    open_pages = [connect(url) for _ in range(MAX_STREAMS)]
    statuses = []
    for page in open_pages:
        page.request("GET", "/events", headers=token(url))
        statuses.append(page.getresponse().status)
    assert set(statuses[:-1]) == {200}
    assert get(url, "/events", token(url))[0] == 503
    for page in open_pages:
        page.close()


def test_a_port_that_is_taken_is_named(url: str, growing: Path) -> None:
    port = urlsplit(url).port
    assert port is not None
    with pytest.raises(ConfigError, match=f"port={port}: cannot be used"):
        asyncio.run(serve(open_runs([str(growing)]), port, print))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_the_page_and_a_second_one_does_no_harm(growing: Path, number: signal.Signals) -> None:
    told: list[str] = []

    def tell(url: str) -> None:
        told.append(url)
        for _ in range(2):
            signal.raise_signal(number)

    before = signal.getsignal(number)
    asyncio.run(serve(open_runs([str(growing)]), 0, tell))
    signal.signal(number, before)
    [url] = told
    with pytest.raises(ConnectionRefusedError):
        get(url, "/")


HOLD = """
import socket, sys
port, count = map(int, sys.argv[1:])
held = []
for _ in range(count):
    line = socket.create_connection(("127.0.0.1", port), timeout=20)
    line.sendall(b"GET / HTTP/1.1\\r\\nHost:")
    held.append(line)
print("held", flush=True)
sys.stdin.read()
"""


def test_half_open_connections_neither_block_the_page_nor_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run", Shape(steps=1, groups=1, samples=1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 60, hard))
    try:
        with serving([str(run)]) as url:
            command = [sys.executable, "-c", HOLD, str(urlsplit(url).port), "300"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"held\n"
                assert get(url, "/api/runs", token(url))[0] == 200
                holder.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(caplog.records) <= 1


def test_garbage_is_logged_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        connection = connect(url)
        connection.connect()
        connection.sock.sendall(b"GET / HTTP/x\r\n\r\n")
        assert b" 400 " in connection.sock.recv(1000)
        connection.close()
    [record] = caplog.records
    assert "rlite view got a request that cannot be read" in record.getMessage()
