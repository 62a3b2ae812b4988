"""The bus over a real Unix socket: a server on its selector, clients in this and other processes."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served
from support import AS_NOBODY, mentions

from pytools.errors import CapabilityError, RefusedError, SwerveError, UsageError
from pytools.ipc import server
from pytools.ipc.bus import AgentGoneError, Bus, Client
from pytools.ipc.server import Server
from pytools.ipc.wire import LINE_BYTES
from pytools.signals import encode


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path / "run" / "agent.sock")
    yield one
    one.close()


def test_signals_of_every_type_arrive_as_they_were(served: Served) -> None:
    client = served.client()
    for signal in samples.one_of_each():
        served.bus.publish(signal)
    got: list[object] = []
    served.until(lambda: got.extend(client.read()) or len(got) == len(samples.one_of_each()), "all have arrived")
    assert got == samples.one_of_each()
    assert (client.dropped, client.malformed, list(client.errors)) == (0, 0, [])


def test_only_wanted_types_are_sent(served: Served) -> None:
    client = served.client(frozenset({"act"}))
    assert not served.bus.wanted("path_delay")
    for signal in samples.one_of_each():
        served.bus.publish(signal)
    served.turn(0.1)
    assert client.next(5) == samples.act()
    assert client.next(0) is None


def test_who_wants_no_details_has_short_windows_only_until_long_ones_come(served: Served) -> None:
    client, other = served.client(frozenset({"path_delay", "app_delay", "act"}), coarse=True), served.client()
    short, long = samples.path_delay(window_ns=80_000_000), samples.path_delay()
    of_one_flow, of_all = samples.app_delay(local="10.9.0.1", local_port=40_000), samples.app_delay()
    published = [short, of_one_flow, long, short, of_all, samples.act(), long]
    for signal in published:
        served.bus.publish(signal)
    served.turn(0.1)
    got, all_of_it = ([one.next(5) for _ in range(count)] for one, count in ((client, 5), (other, 7)))
    assert got == [short, long, of_all, samples.act(), long] and client.next(0) is None
    assert all_of_it == published
    client.want(frozenset({"path_delay"}))  # a second subscription: nothing is sent that was told before
    served.turn(0.1)
    for signal in (short, long, samples.act()):
        served.bus.publish(signal)
    served.turn(0.1)
    assert client.next(5) == long and client.next(0) is None


def test_what_a_client_publishes_reaches_the_others(served: Served) -> None:
    viewer = served.client(frozenset({"path_state", "act"}))
    controller = served.client(frozenset())
    inside = served.bus.subscribe(frozenset({"act"}))
    controller.publish(samples.path_state())
    controller.publish(samples.act())
    got: list[object] = []
    served.until(lambda: got.extend(viewer.read()) or len(got) == 2, "both have arrived")
    assert got == [samples.path_state(), samples.act()]
    assert inside.read() == [samples.act()]
    assert controller.next(0) is None


def test_a_client_waits_in_a_selector(served: Served) -> None:
    client = served.client(frozenset({"act"}))
    with selectors.DefaultSelector() as waiting:
        waiting.register(client, selectors.EVENT_READ)
        assert waiting.select(0) == []
        for number in range(5):
            served.bus.publish(samples.act(number=number))
        served.turn(1)
        assert len(waiting.select(20)) == 1
        assert [each.act_id for each in client.read()] == ["a0", "a1", "a2", "a3", "a4"]


def test_a_slow_client_loses_only_what_is_counted(served: Served) -> None:
    slow, quick = served.client(frozenset({"tcp_path"})), served.client(frozenset({"tcp_path"}))
    published = 20_000
    seen: list[int] = []
    for at_ns in range(published):
        served.bus.publish(samples.tcp_path(at_ns=at_ns))
        if at_ns % 50 == 0:
            served.turn()
            seen += [each.at_ns for each in quick.read()]
    got: list[int] = []

    def drained() -> bool:
        got.extend(each.at_ns for each in slow.read())
        return len(got) + slow.dropped >= published

    served.until(drained, "the slow client has caught up")
    served.until(lambda: seen.extend(each.at_ns for each in quick.read()) or len(seen) >= published, "all came")
    assert slow.dropped > 0
    assert len(got) + slow.dropped == published
    assert got == sorted(set(got))
    assert served.server.drops()["bus_slow"] == slow.dropped
    assert seen == list(range(published)) and quick.dropped == 0


def test_urgent_signals_do_not_wait_behind_others_of_a_slow_client(served: Served) -> None:
    """What the kernel holds already is read in order; nothing that waits with us is read before the urgent ones."""
    slow = served.client()
    while served.server.drops()["bus_slow"] == 0:
        served.bus.publish(samples.tcp_path())
    lost = served.server.drops()["bus_slow"]
    urgent = [samples.path_liveness(missed=3), samples.act(), samples.link_event(), samples.path_state()]
    for signal in urgent:
        served.bus.publish(signal)
    assert served.server.drops()["bus_slow"] == lost, "none of them is dropped"
    got: list[object] = []
    served.until(lambda: got.extend(slow.read()) or all(each in got for each in urgent), "they have arrived")
    places = [got.index(each) for each in urgent]
    assert places == list(range(places[0], places[0] + 4)), "in order, one behind the other"
    served.until(lambda: not (got.extend(slow.read()) or slow.dropped == 0), "the rest has arrived")
    behind = sum(len(encode(each)) for each in got[places[-1] :])  # type: ignore[arg-type]
    assert behind > served.server.queue_bytes // 2
    assert (slow.dropped, slow.dropped_urgent) == (lost, 0)


def test_what_presses_is_sent_at_once(served: Served) -> None:
    client = served.client()
    for signal in (samples.path_liveness(missed=2), samples.act(), samples.link_event()):
        served.bus.publish(samples.tcp_path())
        served.bus.publish(signal)
        assert [client.next(5), client.next(5)] == [samples.tcp_path(), signal], "no turn of the loop was needed"
    served.bus.publish(samples.path_liveness())
    assert client.next(0.05) is None, "a repetition waits for the turn's end"


def test_a_flush_writes_to_all_that_take_it_and_leaves_full_sockets_to_the_selector(served: Served) -> None:
    clients = [served.client(), served.client()]
    served.bus.publish(samples.tcp_path())
    served.server.flush()
    assert [client.next(5) for client in clients] == 2 * [samples.tcp_path()], "no turn of the loop was needed"
    slow, quick = clients
    while not any(connection.blocked for connection in served.server.connections):
        served.bus.publish(samples.tcp_path())
        served.server.flush()
        quick.read()
    waiting = [connection for connection in served.server.connections if connection.blocked]
    assert len(waiting) == 1
    assert slow.read(), "the kernel has room again"
    served.server.flush()
    assert waiting[0].blocked, "it was not tried"
    served.until(lambda: (slow.read(), not waiting[0].blocked)[1], "the selector has told")
    assert (served.server.drops()["bus_slow"], slow.dropped) == (0, 0)


def test_urgent_signals_that_do_not_fit_are_counted_apart(tmp_path: Path) -> None:
    with contextlib.closing(Served(tmp_path / "agent.sock", queue_bytes=4000)) as served:
        client = served.client()
        next(iter(served.server.connections)).sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        for _ in range(100):
            served.bus.publish(samples.act())
        drops = served.server.drops()
        assert 0 < drops["bus_slow_urgent"] == drops["bus_slow"] < 100
        got: list[object] = []
        served.until(lambda: got.extend(client.read()) or len(got) + client.dropped >= 100, "all is accounted for")
        assert client.dropped_urgent == client.dropped == drops["bus_slow"]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(["publish", "burst", "turn", "flush", "read"]), max_size=80))
def test_published_is_received_plus_dropped_in_any_order_of_events(tmp_path: Path, steps: list[str]) -> None:
    with contextlib.closing(Served(tmp_path / "agent.sock", queue_bytes=4000)) as served:
        client = served.client(frozenset({"tcp_path"}))
        next(iter(served.server.connections)).sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        published, got = 0, []
        for step in steps:
            if step in ("publish", "burst"):
                for _ in range(1 if step == "publish" else 30):
                    served.bus.publish(samples.tcp_path(at_ns=published))
                    published += 1
            elif step == "turn":
                served.turn()
            elif step == "flush":
                served.server.flush()
            else:
                got += [each.at_ns for each in client.read()]
        served.until(
            lambda: got.extend(each.at_ns for each in client.read()) or len(got) + client.dropped >= published,
            "everything is accounted for",
        )
        assert len(got) + client.dropped == published
        assert served.server.drops()["bus_slow"] == client.dropped
        assert got == sorted(set(got))
        client.close()


def test_a_malformed_line_is_counted_answered_and_survived(served: Served) -> None:
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(served.path))
    raw.settimeout(20)
    raw.sendall(b'{"type":"subscribe","types":["act"]}\n{"type":"act"\n{"type":"nonsense"}\n\xff\xfe\n')
    raw.sendall(encode(samples.act()) + b"\n")
    served.until(lambda: served.server.drops()["bus_malformed"] == 3, "three lines are rejected")
    answer = b""
    while answer.count(b"\n") < 4:
        served.turn(0.01)
        answer += raw.recv(65536)
    lines = answer.splitlines()
    assert [line.startswith(b'{"type":"error","message":"') for line in lines] == [True, True, True, False]
    assert lines[3] == encode(samples.act())
    raw.close()
    served.until(lambda: served.server.clients == 0, "the client is gone")
    assert not served.bus.wanted("act")


def test_a_line_without_end_does_not_fill_the_memory(served: Served) -> None:
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(served.path))
    raw.setblocking(False)
    left = LINE_BYTES * 2
    while left:
        try:
            left -= raw.send(b"x" * min(left, 1 << 16))
        except BlockingIOError:
            served.turn(0.01)
    served.until(lambda: served.server.drops()["bus_malformed"] == 1, "the line is rejected")
    raw.close()


def test_an_unknown_subscription_is_refused_at_both_ends(served: Served) -> None:
    with pytest.raises(UsageError, match="no such signal type"):
        Client(served.path, frozenset({"nope"}))
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(served.path))
    raw.sendall(b'{"type":"subscribe","types":["nope"]}\n')
    served.until(lambda: served.server.drops()["bus_malformed"] == 1, "it is rejected")
    raw.close()


def test_the_socket_is_for_its_user_only(served: Served) -> None:
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(served.path.parent.stat().st_mode) == 0o700


def test_another_user_is_refused_even_through_an_open_door(served: Served) -> None:
    for place in (served.path, served.path.parent):
        place.chmod(0o777)
    script = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX); s.settimeout(20);"
        f"s.connect({served.path.name!r}); sys.stdout.write(s.makefile().read())"
    )
    command = [*AS_NOBODY, sys.executable, "-I", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=served.path.parent) as stranger:
        served.until(lambda: stranger.poll() is not None, "the stranger is shown out")
        assert stranger.stdout is not None
        assert "only root and user 0 may connect" in stranger.stdout.read()
    assert served.server.drops()["bus_refused"] == 1


# ---- the socket for reading only ----

_GROUP = 4242


@pytest.fixture
def for_readers(tmp_path: Path) -> Iterator[Served]:
    tmp_path.chmod(0o755)
    for above in tmp_path.parents[:2]:
        above.chmod(0o755)
    (tmp_path / "run").mkdir(mode=0o755)
    one = Served(tmp_path / "run" / "host.read", readers=_GROUP)
    yield one
    one.close()


def test_a_reader_reads_and_what_it_publishes_ends_its_connection(for_readers: Served) -> None:
    client, seen = for_readers.client(frozenset({"act"})), for_readers.bus.subscribe(frozenset({"path_state"}))
    for_readers.bus.publish(samples.act())
    for_readers.turn(0.1)
    assert client.next(5) == samples.act()
    client.publish(samples.path_state())
    with pytest.raises(AgentGoneError, match="it said: nothing is published here: this socket is for reading only"):
        for_readers.until(client.read, "never")
    assert seen.read() == []
    assert for_readers.server.drops()["bus_readers_published"] == 1
    assert for_readers.server.clients == 0


def test_a_reader_that_asks_again_and_again_is_shown_out(for_readers: Served) -> None:
    client = for_readers.client(frozenset({"act"}))
    with pytest.raises(AgentGoneError, match="more than 64 lines were sent"):
        for _ in range(100):
            client.want(frozenset({"act"}))
            for_readers.until(lambda: not client.read(), "its line is read")
    assert for_readers.server.drops()["bus_readers_malformed"] == 1


@pytest.mark.parametrize(
    ("user", "group", "groups", "let_in"),
    [
        (61_863, _GROUP, "--clear-groups", True),
        (61_863, 61_863, f"--groups={_GROUP}", True),
        (61_863, 61_863, "--clear-groups", False),
        (0, 0, "--clear-groups", True),
    ],
)
def test_who_may_read(for_readers: Served, user: int, group: int, groups: str, let_in: bool) -> None:
    script = (
        "import contextlib,socket,sys; s=socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect('host.read')\n"
        """with contextlib.suppress(BrokenPipeError): s.send(b'{"type":"subscribe","types":["act"]}\\n')\n"""
        "sys.stdout.write(s.makefile().readline())"
    )
    who = ["setpriv", f"--reuid={user}", f"--regid={group}", groups]
    command = [*who, sys.executable, "-I", "-c", script]
    folder = for_readers.path.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as reader:
        for_readers.until(lambda: for_readers.bus.wanted("act") or reader.poll() is not None, "it asks")
        for_readers.bus.publish(samples.act())
        for_readers.until(lambda: reader.poll() is not None, "it has an answer")
        assert reader.stdout is not None
        said = reader.stdout.read()
    assert ('"type":"act"' in said) == let_in, said
    assert mentions(said, "root", "user 0", "group swerve-metrics") == (not let_in)
    assert for_readers.server.drops()["bus_readers_refused"] == (not let_in)


def test_readers_have_places_of_their_own(for_readers: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READERS", 1)
    with for_readers.client(), Client(for_readers.path, None) as late:
        for_readers.until(lambda: for_readers.server.drops()["bus_readers_refused"] == 1, "it is shown out")
        with pytest.raises(AgentGoneError, match="1 clients are connected already"):
            for_readers.until(late.read, "never")


def test_the_hint_of_the_readers_socket_names_the_instance(tmp_path: Path) -> None:
    with pytest.raises(SwerveError, match="start it with: swerve agent -n swerve-x-h1"):
        Client(tmp_path / "swerve-x-h1.read")


def test_one_client_too_many_is_not_told_to_start_an_agent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CLIENTS", 1)
    with served.client(), Client(served.path, None) as late:
        served.until(lambda: served.server.drops()["bus_refused"] == 1, "it is shown out")
        with pytest.raises(AgentGoneError, match="it said: 1 clients are connected already; end one of them") as raised:
            served.until(late.read, "never")
    assert "start it" not in str(raised.value)


def test_a_live_agent_is_not_replaced(served: Served) -> None:
    with pytest.raises(RefusedError, match=f"process {os.getpid()} already serves"):
        Server(Bus(), served.path)
    client = served.client()
    served.bus.publish(samples.act())
    served.turn(0.1)
    assert client.next(5) == samples.act()


def test_the_socket_of_a_dead_agent_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    script = (
        "import os,sys,signal; from pathlib import Path; from pytools.ipc.bus import Bus;"
        "from pytools.ipc.server import Server;"
        "Server(Bus(), Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -9 and path.exists()
    with pytest.raises(SwerveError, match="no agent serves"):
        Client(path)
    with Server(Bus(), path):
        Client(path).close()
    assert not path.exists()


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(RefusedError, match="may be written by others"):
        Server(Bus(), tmp_path / "agent.sock")


def test_without_an_agent_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(SwerveError, match="start it with: swerve agent -n swerve-x-h1") as caught:
        Client(tmp_path / "swerve-x-h1" / "agent.sock")
    assert caught.value.exit_code == 1 and not isinstance(caught.value, CapabilityError)
    with pytest.raises(SwerveError, match=r"start it with: swerve agent$"):
        Client(tmp_path / "host" / "agent.sock")


def test_a_client_reads_to_the_end_and_then_says_that_the_agent_is_gone(served: Served) -> None:
    client = served.client()
    for number in range(3):
        served.bus.publish(samples.act(number=number))
    served.server.close()
    assert [client.next(5), client.next(5), client.next(5)] == [samples.act(number=each) for each in range(3)]
    with pytest.raises(AgentGoneError, match="closed the connection"):
        client.next(5)
    with pytest.raises(AgentGoneError):
        client.read()
    with pytest.raises(AgentGoneError):
        client.publish(samples.act())


def test_a_client_that_vanishes_costs_nobody_anything(served: Served) -> None:
    gone, stays = served.client(), served.client()
    gone.close()
    for number in range(2000):
        served.bus.publish(samples.act(number=number))
        if number % 10 == 0:
            served.turn()
            stays.read()
    served.until(lambda: served.server.clients == 1, "the server noticed")
    assert served.server.drops()["bus_slow"] == 0


def test_publishing_never_waits_for_a_stuck_agent(served: Served) -> None:
    client = served.client(frozenset())
    big = samples.act(because="x" * 10_000)
    sent = 0
    while client.unpublished == 0:  # the agent's loop does not turn
        client.publish(big)
        sent += 1
    inside = served.bus.subscribe(frozenset({"act"}))
    received = 0

    def all_in() -> bool:
        nonlocal received
        client.read()
        received += len(inside.read())
        return received >= sent - 1

    served.until(all_in, "what was not dropped has arrived")
    assert received == sent - client.unpublished == sent - 1
