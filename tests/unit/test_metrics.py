"""`swerve metrics` as Prometheus and people meet it: a real process, real sockets, agents that come and go."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import samples
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from serving import Served
from support import ROOT, SWERVE, mentions, run, wait_until

from pytools.errors import RefusedError, SwerveError, UsageError
from pytools.views.metrics import command
from pytools.views.metrics.model import TYPES, Model
from pytools.views.metrics.server import AT_ONCE, MetricsServer, address_of

pytestmark = pytest.mark.slow

NETNS = "swerve-t-h1"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"{NETNS}.read"


@contextlib.contextmanager
def turning(path: Path, queue_bytes: int = 1 << 20, lines: int = 1) -> Iterator[Served]:
    """An agent that publishes one signal of every type, again and again, as they are now."""
    served, stop = Served(path, queue_bytes), threading.Event()

    def turn() -> None:
        while not stop.is_set():
            served.turn(0.02)
            for _ in range(lines):
                for each in samples.one_of_each(time.monotonic_ns()):
                    served.bus.publish(each)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield served
    finally:
        stop.set()
        thread.join()
        served.close()


class Process:
    """`swerve metrics` at work."""

    def __init__(self, *words: str) -> None:
        command = [*SWERVE, "metrics", "--listen", "127.0.0.1:0", "-n", NETNS, *words]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.fullmatch(rf"swerve: metrics of {NETNS} at http://127\.0\.0\.1:(\d+)/metrics\n", line)
        assert found, line
        self.port = int(found[1])

    def scrape(self, accept: str = "", encoding: str = "", path: str = "/metrics") -> tuple[int, str, str]:
        """Status, type and text of the answer."""
        return get(self.port, accept, encoding, path)

    def value(self, name: str) -> float | None:
        """A series without labels."""
        found = [s.value for family in parse_text(self.scrape()[2]) for s in family.samples if s.name == name]
        return found[0] if found else None

    def totals(self) -> dict[tuple[str, str], float]:
        """Everything that must not go back, of the agent."""
        return {
            (sample.name, str(sorted(sample.labels.items()))): sample.value
            for family in parse_text(self.scrape()[2])
            for sample in family.samples
            if family.type in ("counter", "histogram") and not family.name.startswith("process_")
        }

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(20)


def get(port: int, accept: str = "", encoding: str = "", path: str = "/metrics") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Accept": accept, "Accept-Encoding": encoding})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.headers["Content-Encoding"] == "gzip":
        body = gzip.decompress(body)
    return answer.status, answer.headers["Content-Type"], body.decode()


@pytest.fixture
def process(place: Path) -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def start() -> Process:
        started.append(Process())
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        assert each.process.stderr is not None
        each.process.stderr.close()


# ---- the process ----


def test_who_asks_for_openmetrics_gets_it_and_others_get_text(place: Path, process: Callable[[], Process]) -> None:
    with turning(place):
        one = process()
        wait_until(lambda: one.value("swerve_up"), 10, "it is up")
        status, kind, text = one.scrape(OPENMETRICS)
        assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
        assert text.endswith("# EOF\n")
        assert "swerve_up" in {family.name for family in parse_openmetrics(text)}
        status, kind, text = one.scrape("text/plain", "gzip")
        assert (status, kind.partition(";")[0]) == (200, "text/plain")
        names = {family.name for family in parse_text(text)}
        assert {"swerve_up", "process_resident_memory_bytes", "process_cpu_seconds"} <= names
        assert "# EOF" not in text
        some = one.scrape(path="/metrics?name[]=swerve_up")[2]
        assert [family.name for family in parse_text(some)] == ["swerve_up"]
        assert [one.scrape(path=path)[0] for path in ("/", "/other")] == [200, 404]
        assert one.end() == 0


def test_the_agent_may_go_and_come_back(place: Path, process: Callable[[], Process]) -> None:
    one = process()
    assert one.value("swerve_up") == 0
    with turning(place):
        wait_until(lambda: one.value("swerve_up") == 1, 10, "the agent is found")
        wait_until(lambda: one.value("swerve_agent_resident_memory_bytes"), 10, "its cost is known")
        wait_until(lambda: (one.value("swerve_metrics_signals_total") or 0) > 500, 10, "signals come")
    wait_until(lambda: one.value("swerve_up") == 0, 10, "the agent is missed")
    before = one.totals()
    assert len(before) > 100
    assert one.value("swerve_clock_bound_seconds") is None
    with turning(place):
        wait_until(lambda: one.value("swerve_clock_bound_seconds") is not None, 10, "another agent is found")
        after = one.totals()
        assert {name for name, was in before.items() if after.get(name, -1) < was} == set()
    assert one.value("swerve_agent_connects_total") == 2
    assert one.end() == 0


def test_an_interrupt_ends_it(place: Path, process: Callable[[], Process]) -> None:
    one = process()
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(20) == 130


def test_without_an_agent_once_says_so(place: Path) -> None:
    done = run([*SWERVE, "metrics", "--once", "-n", NETNS], check=False)
    assert done.returncode == 1
    assert "\nswerve_up 0.0\n" in done.stdout
    assert mentions(done.stderr, "swerve", "no agent", str(place), f"swerve agent -n {NETNS}")


PARSERS = {"text": ("", parse_text), "openmetrics": ("--openmetrics", parse_openmetrics)}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What `--once` prints in each format, on either stream: both wait for the agent at the same time."""
    folder = tmp_path_factory.mktemp("once")
    with turning(folder / f"{NETNS}.read"), contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                subprocess.Popen(
                    [*SWERVE, "metrics", "--once", "-n", NETNS, *option.split()],
                    cwd=ROOT,
                    env=os.environ | {"SWERVE_RUNTIME_DIR": str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for name, (option, _) in PARSERS.items()
        }
        said = {name: process.communicate(timeout=60) for name, process in processes.items()}
        assert {process.returncode for process in processes.values()} == {0}, said
    return said


@pytest.mark.parametrize("name", PARSERS)
def test_once_prints_everything(once: dict[str, tuple[str, str]], name: str) -> None:
    out, err = once[name]
    assert err == ""
    names = {family.name for family in PARSERS[name][1](out)}
    assert {"swerve_up", "swerve_agent_cpu_ratio", "swerve_path_round_trip_seconds", "swerve_link_bytes"} <= names
    assert "\nswerve_up 1.0\n" in out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--listen", "0.0.0.0:9762"), 4, "--allow-remote"),
        (("--listen", "localhost:9762"), 2, "write it like"),
        (("--listen", "127.0.0.1:99999"), 2, "write it like"),
        (("--once", "-j"), 2, "No such option '-j'"),
        (("--openmetrics",), 2, "--openmetrics needs --once"),
    ],
)
def test_what_is_asked_wrongly_is_refused(place: Path, words: tuple[str, ...], code: int, says: str) -> None:
    done = run([*SWERVE, "metrics", "-n", NETNS, *words], check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr


def test_an_address_in_use_is_one_line(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run([*SWERVE, "metrics", "-n", NETNS, "--listen", where], check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"swerve: --listen: {where}: ") and done.stderr.count("\n") == 1


# ---- where to listen ----


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:9762", ("127.0.0.1", 9762)), ("[::1]:0", ("::1", 0)), ("127.1.2.3:65535", ("127.1.2.3", 65535))],
)
def test_an_address_of_our_own(text: str, address: tuple[str, int]) -> None:
    assert address_of(text, allow_remote=False) == address


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:9762", "[fe80::1]:1", "[::ffff:10.0.0.1]:1"])
def test_an_address_that_others_reach_has_to_be_allowed(text: str) -> None:
    with pytest.raises(RefusedError):
        address_of(text, allow_remote=False)
    assert address_of(text, allow_remote=True)[1] in (1, 9762)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "9762", ":9762", "127.0.0.1", "127.0.0.1:", "::1:9762", "[127.0.0.1]:1", "a:1"),
        *("127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:x"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        address_of(text, allow_remote=True)


# ---- the server ----


@pytest.fixture
def server() -> Iterator[tuple[MetricsServer, list[int]]]:
    refused: list[int] = []
    registry = CollectorRegistry()
    registry.register(command.ModelCollector(Model(), threading.Lock(), NETNS))
    with contextlib.closing(MetricsServer(("127.0.0.1", 0), registry, lambda: refused.append(1))) as one:
        yield one, refused


def test_readers_that_hang_hold_up_nobody_and_are_few(server: tuple[MetricsServer, list[int]]) -> None:
    one, refused = server
    with contextlib.ExitStack() as hanging:
        for _ in range(AT_ONCE - 1):
            hanging.enter_context(socket.create_connection(("127.0.0.1", one.server_port)))
        wait_until(lambda: one.under_way == AT_ONCE - 1, 10, "they are served")
        assert get(one.server_port)[0] == 200
        wait_until(lambda: one.under_way == AT_ONCE - 1, 10, "that one is done")
        hanging.enter_context(socket.create_connection(("127.0.0.1", one.server_port)))
        wait_until(lambda: one.under_way == AT_ONCE, 10, "there is no room")
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", one.server_port), 10) as late:
            late.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            if not late.recv(100):
                raise ConnectionResetError
        assert refused == [1]
    wait_until(lambda: one.under_way == 0, 10, "there is room again")
    assert get(one.server_port)[0] == 200


@pytest.mark.parametrize("line", [b"\0\xff\n\n", b"GET\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n", b"G" * 70_000])
def test_nonsense_is_answered_or_dropped(server: tuple[MetricsServer, list[int]], line: bytes) -> None:
    one, _ = server
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", one.server_port), 10) as sock:
        sock.sendall(line)
        sock.shutdown(socket.SHUT_WR)
        assert b" 200 " not in sock.recv(1000)
    assert get(one.server_port)[0] == 200


# ---- the feed ----


@contextlib.contextmanager
def feeding(path: Path) -> Iterator[tuple[command.Feed, Model, list[str]]]:
    model, said = Model(), list[str]()
    with contextlib.closing(command.Feed(path, model, threading.Lock(), said.append)) as feed:
        yield feed, model, said


def test_what_the_agent_costs_is_asked_for_in_short_looks(place: Path) -> None:
    served, now = Served(place), 1_000 * samples.SECOND_NS
    with contextlib.closing(served), feeding(place) as (feed, model, _):
        feed.turn(now)
        served.until(lambda: served.bus.wanted("self") and served.bus.wanted("act"), "both subscriptions are there")
        for looks in (0, 1):
            served.bus.publish(samples.self_cost())
            served.turn()
            feed.turn(now)
            assert feed.looks == looks
        served.until(lambda: not served.bus.wanted("self"), "nobody asks what it costs any more")
        assert served.bus.wanted("act")
        feed.turn(now + command.LOOK_EVERY_NS - 1)
        for _ in range(5):  # to accept a connection, and to read from it
            served.turn(0.01)
        assert served.server.clients == 1 and not served.bus.wanted("self")
        feed.turn(now + command.LOOK_EVERY_NS)
        served.until(lambda: served.bus.wanted("self"), "the next look")
        feed.turn(now + 2 * command.LOOK_EVERY_NS)  # the agent said nothing about itself
        served.until(lambda: not served.bus.wanted("self"), "that look is given up")
        assert (feed.looks, model.signals) == (1, 2)


def test_everything_but_single_connections_is_asked_for(place: Path) -> None:
    served = Served(place)
    with contextlib.closing(served), feeding(place) as (feed, _, _):
        feed.turn(0)
        served.until(lambda: served.bus.wanted("act"), "it is subscribed")
        assert not served.bus.wanted("tcp_flow") and not served.bus.wanted("clock_edge")
        assert all(served.bus.wanted(kind) for kind in TYPES)


def test_signals_that_the_agent_dropped_are_counted_across_connections(place: Path) -> None:
    lost: list[int] = []
    with feeding(place) as (feed, model, _):
        for now in (0, 10**12):
            with contextlib.closing(Served(place, queue_bytes=2_000)) as served:
                feed.turn(now)
                served.until(lambda: served.bus.wanted("link"), "it is subscribed")
                while served.server.drops()["bus_slow"] == 0:  # more than fits, and not a word is read meanwhile
                    served.bus.publish(samples.tcp_path())
                lost.append(served.server.drops()["bus_slow"])
                served.until(lambda: feed.turn(now) or model.dropped == sum(lost), "the loss is told")  # noqa: B023
            wait_until(lambda: feed.turn(now) or not model.connected, 10, "the agent is missed")  # noqa: B023
    assert model.dropped == sum(lost) > lost[0] > 0


def test_signals_are_read_while_somebody_makes_an_exposition(place: Path) -> None:
    model, lock = Model(), threading.Lock()
    with (
        contextlib.closing(Served(place, queue_bytes=2_000)) as served,
        contextlib.closing(command.Feed(place, model, lock, lambda _: None)) as feed,
    ):
        feed.turn(0)
        served.until(lambda: served.bus.wanted("link"), "it is subscribed")
        with lock:
            for _ in range(2_000):  # a thousand times what the agent keeps for a reader
                served.bus.publish(samples.tcp_path())
                served.turn()
                feed.turn(0)
            assert (model.signals, served.server.drops()["bus_slow"]) == (0, 0)
        served.until(lambda: feed.turn(0) or model.signals == 2_000, "all are in the model")
        assert model.dropped == 0


def test_what_an_agent_said_last_counts_as_its_own(place: Path) -> None:
    model, lock = Model(), threading.Lock()
    with contextlib.closing(command.Feed(place, model, lock, lambda _: None)) as feed:
        with contextlib.closing(Served(place)) as served:
            feed.turn(0)
            served.until(lambda: served.bus.wanted("link"), "it is subscribed")
            with lock:
                served.bus.publish(samples.tcp_path())
                served.turn()
                feed.turn(0)
                assert model.signals == 0
        feed.turn(0)
        assert (model.connected, model.signals) == (False, 1)


def test_another_process_is_another_agent(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, agents = 0, iter((7, 7, 8))
    monkeypatch.setattr(command, "agent_pid", lambda client: next(agents))
    with feeding(place) as (feed, model, said):
        for expected in (1, 1, 2):
            now += 10**9
            with contextlib.closing(Served(place)) as served:
                feed.turn(now)
                assert model.connected and model.epoch == expected
                served.turn()
            feed.turn(now)
            assert not model.connected
    assert [line.partition(":")[0] for line in said] == ["connected to the agent", "no metrics but totals"] * 3


def test_the_agent_is_known_by_its_process(place: Path) -> None:
    with contextlib.closing(Served(place)) as served, served.client() as client:
        assert command.agent_pid(client) == os.getpid()


def test_that_there_is_no_agent_is_said_once(place: Path) -> None:
    with feeding(place) as (feed, model, said):
        for second in range(10):
            feed.turn(second * 10**9)
    assert len(said) == 1 and "no agent serves" in said[0]
    assert (model.connected, model.connects) == (False, 0)


def test_a_server_that_cannot_listen_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SwerveError, match="choose another port"):
        MetricsServer(taken.getsockname(), CollectorRegistry(), lambda: None)
