"""The bus between hosts on real connections: agents' ends in the namespaces of a lab, a process each.

A node is driven over its standard input and answers on its standard output, one JSON document a line.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support

from pytools.kernel.netns import inside
from pytools.lab import Lab

pytestmark = pytest.mark.beside

STALL_S = 4 * support.slow_factor()  # zenoh's own limits, which nobody shall wait for, are 5 to 10 s

NODE = """
import json, os, select, sys, time
import msgspec
from pytools import config
from pytools.ipc import hosts
from pytools.errors import SwerveError
from pytools.kernel import netns

setting = json.loads(sys.argv[1])
netns.enter(setting["netns"])
peers = msgspec.convert(setting["peers"], list[config.Peer])
try:
    bus = hosts.HostBus(setting["host"], peers, config.HostBus(**setting["bus"]))
except SwerveError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    sys.exit(error.exit_code)
got = []
slowest_s = 0.0

def answer(word):
    global slowest_s
    if word["do"] == "send":
        for _ in range(word.get("times", 1)):
            at = time.monotonic()
            bus.send(word["topic"], word["payload"].encode() * word.get("repeat", 1), word.get("to"))
            slowest_s = max(slowest_s, time.monotonic() - at)
    tasks = os.listdir("/proc/self/task")
    return {
        "got": got,
        "drops": bus.drops(),
        "confirmed": bus.confirmed(),
        "slowest_s": slowest_s,
        "namespaces": len({os.stat(f"/proc/self/task/{task}/ns/net").st_ino for task in tasks}),
        "threads": len(tasks),
    }

print(json.dumps({"up": True}), flush=True)
while True:
    bus.tick(time.monotonic_ns())
    got += [[sender, len(payload), payload[:40].decode()] for sender, payload in bus.receive("news")]
    if select.select([sys.stdin], [], [], 0.01)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        print(json.dumps(answer(json.loads(line))), flush=True)
bus.close()
"""


class Node:
    """One host's end of the bus, in its own process."""

    def __init__(self, host: Any, names: dict[str, str], key: Path) -> None:
        self.host = host
        peers = [{"name": name, "address": address} for name, address in names.items() if name != host.name]
        setting = {"netns": host.netns, "host": host.name, "peers": peers, "bus": {"key_file": str(key)}}
        self.process = open_process(NODE, setting)
        self.first = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def _do(self, **word: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(word) + "\n")
        self.process.stdin.flush()
        return self._read()

    def send(self, payload: str, to: str | None = None, **more: object) -> dict[str, Any]:
        return self._do(do="send", topic="news", payload=payload, to=to, **more)

    def look(self) -> dict[str, Any]:
        return self._do(do="look")

    def heard(self) -> list[tuple[str, str]]:
        return [(sender, start) for sender, _, start in self.look()["got"]]

    def confirms(self, *names: str) -> None:
        support.wait_until(lambda: set(names) <= set(self.look()["confirmed"]), 20, f"{self.host.name}: {names} speak")

    def hears(self, sender: str, payload: str) -> None:
        what = f"{self.host.name} hears {payload} from {sender}"
        support.wait_until(lambda: (sender, payload) in self.heard(), 10, what)

    def counted(self, cause: str) -> int:
        return int(self.look()["drops"][f"host_bus_{cause}"])

    def end(self) -> int:
        """Ask it to stop."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Node]
Keep = Callable[[subprocess.Popen[str]], None]

THIEF = """
import json, os, sys
import zenoh
from pytools.ipc import hosts, sealed
from pytools.kernel import netns

setting = json.loads(sys.argv[1])
netns.enter(setting["netns"])
secret = hosts.read_key(hosts.Path(setting["key"]))
key = sealed.derived(secret, "messages")
settings = hosts._settings([setting["address"]], setting["peers"], 7447)
with hosts._held("x:y") as file:
    login = {"user": "swerve", "password": sealed.derived(secret, "connections").hex(), "dictionary_file": file}
    settings["transport"]["auth"] = {"usrpwd": login}
    session = zenoh.open(zenoh.Config.from_json5(json.dumps(settings)))
recorded = []
subscriber = session.declare_subscriber("swerve/**", lambda sample: recorded.append(bytes(sample.payload)),
                                        allowed_origin=zenoh.Locality.REMOTE)
loot = []

def put(raw):
    session.put("swerve/h1", raw)

def act(do):
    loot[:] = loot or [raw for raw in recorded if b"pay once" in raw]
    message = sealed.decode(loot[0]) if loot else None
    if do == "replay":
        put(loot[0])
    elif do == "alter":
        put(loot[0].replace(b"once", b"more"))
    elif do == "stranger":
        put(sealed.encode(message._replace(sender="h9"), key))
    elif do == "divert":
        put(sealed.encode(message._replace(to="h3", sequence=99), key))
    elif do == "noise":
        put(os.urandom(100))
    return {"peers": len(list(session.info.peers_zid())), "messages": len(loot)}

print("{}", flush=True)
for line in sys.stdin:
    print(json.dumps(act(json.loads(line))), flush=True)
session.close()
"""


class Thief:
    """Somebody in host 3 who has got into the connections, and records and repeats what passes."""

    def __init__(self, lab: Lab, keep: Keep, key: Path) -> None:
        one, two, three = lab.hosts
        setting = {"netns": three.netns, "key": str(key), "address": three.service, "peers": [one.service, two.service]}
        self.process = open_process(THIEF, setting)
        keep(self.process)
        self.do_read()

    def do_read(self) -> dict[str, int]:
        assert self.process.stdout is not None
        answer: dict[str, int] = json.loads(self.process.stdout.readline())
        return answer

    def do(self, what: str) -> dict[str, int]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.do_read()


def open_process(program: str, setting: object) -> subprocess.Popen[str]:
    """Run one of the programs above."""
    return subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(setting)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=support.ROOT,
    )


LAB = {"hosts": 3, "rate": "100mbit"}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_key(tmp_path / "key", b"k" * 40)


def write_key(path: Path, secret: bytes) -> Path:
    path.touch(0o600)
    path.write_bytes(secret)
    return path


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Whatever process is handed in is killed at the end."""
    with contextlib.ExitStack() as processes:

        def take(process: subprocess.Popen[str]) -> None:
            processes.callback(process.wait)
            processes.callback(process.kill)

        yield take


@pytest.fixture
def start(lab: Lab, key: Path, keep: Keep) -> Start:
    """Start the end of a host by its number."""
    names = {host.name: host.service for host in lab.hosts}

    def make(number: int, key: Path = key) -> Node:
        node = Node(lab.hosts[number - 1], names, key)
        keep(node.process)
        return node

    return make


def test_to_all_and_to_one(start: Start) -> None:
    one, two, three = start(1), start(2), start(3)
    for node, others in ((one, "23"), (two, "13"), (three, "12")):
        node.confirms(*(f"h{number}" for number in others))
    one.send("everybody")
    two.hears("h1", "everybody")
    three.hears("h1", "everybody")
    one.send("only you", "h3")
    one.send("last")
    for node in (two, three):
        node.hears("h1", "last")
    three.hears("h1", "only you")
    assert ("h1", "only you") not in two.heard()
    for node in (one, two, three):
        seen = node.look()
        assert seen["namespaces"] == 1, "a thread of zenoh's runs in another namespace"
        assert not any(count for cause, count in seen["drops"].items() if not cause.endswith("unsent")), seen["drops"]
        assert node.end() == 0


def test_a_wrong_key_keeps_a_host_out(start: Start, tmp_path: Path) -> None:
    one, three = start(1), start(3)
    stranger = start(2, key=write_key(tmp_path / "other", b"o" * 40))
    one.confirms("h3")
    three.confirms("h1")
    stranger.send("believe me")
    one.send("for friends")
    three.hears("h1", "for friends")
    assert one.look()["confirmed"] == ["h3"] and stranger.look()["confirmed"] == []
    assert one.heard() == [] and stranger.heard() == []
    one.send("is it you?", "h2")
    assert one.counted("unsent") == 2


def test_recorded_and_made_up_messages_are_refused(start: Start, lab: Lab, key: Path, keep: Keep) -> None:
    one, two = start(1), start(2)
    thief = Thief(lab, keep, key)
    one.confirms("h2")
    two.confirms("h1")
    support.wait_until(lambda: thief.do("connected")["peers"] == 2, 20, "the thief has joined")
    two.send("pay once")
    one.hears("h2", "pay once")
    support.wait_until(lambda: thief.do("recorded")["messages"] >= 1, 20, "the thief has it too")

    def refused(cause: str, do: str) -> None:
        before = one.counted(cause)
        thief.do(do)
        support.wait_until(lambda: one.counted(cause) > before, 10, f"{do}: {cause}")

    refused("replayed", "replay")
    refused("forged", "alter")
    refused("foreign", "stranger")
    refused("misdirected", "divert")
    refused("malformed", "noise")
    assert one.heard() == [("h2", "pay once")]

    one.kill()
    one = start(1)  # it remembers nothing; host 2 still is in the session of the recording
    support.wait_until(lambda: thief.do("replay")["peers"] == 2, 20, "the thief has joined again")
    one.confirms("h2")
    refused("replayed", "replay")
    two.kill()
    two = start(2)  # now the recording is of an earlier session
    two.confirms("h1")
    two.send("a new life")
    one.hears("h2", "a new life")
    refused("unconfirmed", "replay")
    two.send("and on")
    one.hears("h2", "and on")
    assert one.heard() == [("h2", "a new life"), ("h2", "and on")]


def test_peers_come_go_and_come_back(start: Start) -> None:
    one, two = start(1), start(2)  # host 3 is never up
    one.confirms("h2")
    two.confirms("h1")
    two.send("first life")
    one.hears("h2", "first life")
    two.kill()
    assert one.send("nobody there", times=200)["slowest_s"] < STALL_S
    again = start(2)
    again.confirms("h1")
    again.send("second life")
    one.hears("h2", "second life")
    one.send("welcome back")
    again.hears("h1", "welcome back")
    assert one.counted("replayed") == 0
    assert ("h1", "nobody there") not in again.heard()


def test_a_stopped_peer_holds_nobody_up(start: Start) -> None:
    one, two, three = start(1), start(2), start(3)
    one.confirms("h2", "h3")
    three.confirms("h1")
    two.process.send_signal(signal.SIGSTOP)
    sent = one.send("x", repeat=100_000, times=100)  # far more than buffers and sockets on the way hold
    what = "the other peer is served"  # as soon as there is room on its connection again
    support.wait_until(lambda: one.send("still here") and ("h1", "still here") in three.heard(), 20, what)
    assert sent["slowest_s"] < STALL_S, "sending waited for a peer that takes nothing"
    two.process.send_signal(signal.SIGCONT)
    one.confirms("h2")
    support.wait_until(lambda: two.look()["confirmed"], 20, "the stopped peer is back")


def test_a_path_that_swallows_everything_holds_nobody_up(start: Start, lab: Lab) -> None:
    for rail in lab.rails:
        lab.blackhole(rail.number)
    one, two = start(1), start(2)  # host 1 connects, and hears neither yes nor no
    assert one.send("x", times=100)["slowest_s"] < STALL_S
    began = time.monotonic()
    assert one.end() == 0
    assert time.monotonic() - began < STALL_S, "the end waited for an attempt to connect"
    lab.heal()
    again = start(1)
    again.confirms("h2")
    two.confirms("h1")


def test_large_messages(start: Start) -> None:
    one, two = start(1), start(2)
    one.confirms("h2")
    two.confirms("h1")
    one.send("y", repeat=1 << 19)
    sizes = [size for _, size, _ in support.wait_until(lambda: two.look()["got"], 20, "half a megabyte arrives")]
    assert sizes == [1 << 19]
    one.send("z", repeat=(1 << 19) + 1)
    assert one.counted("oversize") == 1
    one.send("after")
    two.hears("h1", "after")


def test_strangers_are_shown_out(start: Start, lab: Lab) -> None:
    one = start(1)
    with inside(lab.hosts[2].netns), socket.create_connection((lab.hosts[0].service, 7447), timeout=20) as stranger:
        stranger.sendall(b"hello")
        assert stranger.recv(100) == b""
    two = start(2)
    one.confirms("h2")
    two.confirms("h1")


def test_a_port_in_use_is_named(start: Start, lab: Lab) -> None:
    with inside(lab.hosts[0].netns), socket.create_server(("", 7447)):
        refused = start(1)
    assert "port 7447" in refused.first["error"] and "bus.port" in refused.first["error"]
    assert refused.process.wait(20) == 1


def test_an_end_without_a_way_to_anybody_waits_for_one(veth_pair: tuple[str, str], key: Path, keep: Keep) -> None:
    left, right = (SimpleNamespace(netns=netns, name=name) for netns, name in zip(veth_pair, "ab", strict=True))
    names = {"a": "fd77::1", "b": "fd77::2"}
    support.run(["ip", "-n", left.netns, "address", "flush", "dev", "v0"])
    one, two = Node(left, names, key), Node(right, names, key)
    keep(one.process)
    keep(two.process)
    assert one.look()["confirmed"] == [] and one.first == {"up": True}
    support.run(["ip", "-n", left.netns, "address", "add", "fd77::1/64", "dev", "v0", "nodad"])
    one.confirms("b")
    two.confirms("a")
    one.send("at last")
    two.hears("a", "at last")
