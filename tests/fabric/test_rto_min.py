"""A minimum RTO for managed routes: live connections have it before their rail goes silent; nothing stays of it."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

import pytest
import steering_kit as kit
import support
from steering_kit import controlled

from pytools.kernel.netns import inside
from steering.commands import status

pytestmark = pytest.mark.beside

NEAR, FAR, PORT = "10.9.0.1", "10.9.0.2", 7
KERNELS_MS = 200
OURS = ", rto_min: 20ms"
POLICY = kit.POLICY.replace("[10.9.0.0/16]", "[10.9.0.0/16]MORE")


@pytest.fixture
def far(make_namespace):
    return make_namespace()


@pytest.fixture
def host(make_namespace, far):
    made = kit.two_rails(make_namespace(), far)
    hops = " ".join(f"nexthop via 10.{rail}.1.2" for rail in (1, 2))
    for netns, address in ((made.netns, NEAR), (far, FAR)):
        support.ip(netns, "link set dev lo up", f"address add {address}/32 dev lo")
    support.ip(far, f"route add {NEAR}/32 {hops}")
    return made


class Talk:
    """Connections to an echo at the peer, and their retransmission timers as `ss` shows them."""

    def __init__(self, host: kit.Host, far: str) -> None:
        self._host = host
        with inside(far):
            self._server = socket.create_server((FAR, PORT))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = self._server.accept()
                threading.Thread(target=self._echo, args=(end,), daemon=True).start()

    def _echo(self, end: socket.socket) -> None:
        with end, contextlib.suppress(OSError):
            while data := end.recv(4096):
                end.sendall(data)

    def connect(self) -> socket.socket:
        with inside(self._host.netns):
            made = socket.socket()
        made.settimeout(20 * support.slow_factor())
        made.bind((NEAR, 0))
        made.connect((FAR, PORT))
        return made

    def say(self, over: socket.socket, times: int = 1) -> None:
        for _ in range(times):
            over.sendall(b"?")
            assert over.recv(4096) == b"?"

    def figure(self, name: str, over: socket.socket) -> int:
        """What `ss -ti` says of a connection, without decimals."""
        words = ["ss", "-Htin", "-N", self._host.netns, "sport", f"= :{over.getsockname()[1]}"]
        found = re.search(rf"\b{name}:(?:\d+/)?(\d+)", support.run(words).stdout)
        return int(found.group(1)) if found else 0

    def close(self) -> None:
        self._server.close()


def route(host: kit.Host) -> int:
    """The rail of the connections: all have the same addresses."""
    return int(host.ip("route", "get", FAR, "from", NEAR).partition("dev rail")[2][0])


def told(host: kit.Host) -> list[str]:
    """What `swerve steer status` says."""
    return list(status.lines_of(status.facts_of(host.netns, with_paths=False) | {"paths": []}))


@pytest.mark.parametrize(
    ("wanted", "end"), [("", "stopped"), (", rto_min: 20ms", "killed"), (", rto_min: 20ms", "off")]
)
def test_a_live_connection_retransmits_earlier_off_a_silent_rail(host, far, agent, tmp_path, wanted, end):
    support.require("ss")
    before = host.others()
    policy = kit.policy_file(tmp_path, POLICY.replace("MORE", wanted))
    with contextlib.closing(Talk(host, far)) as talk, contextlib.closing(talk.connect()) as live:
        talk.say(live, 5)
        assert talk.figure("rto", live) >= KERNELS_MS
        rail = route(host)
        with controlled(host, policy, "--apply") as controller:
            support.wait_until(lambda: agent.states.get(kit.path(rail)), 20, "it steers")
            if wanted:
                support.wait_until(lambda: host.ours() == 1, 20, "our routes are in force")
                assert "minimum RTO of managed routes: 20 ms" in told(host)
            assert route(host) == rail, "no connection has moved"
            talk.say(live, 100)
            rto = talk.figure("rto", live)
            assert rto < KERNELS_MS / 4 if wanted else rto >= KERNELS_MS
            host.ip("neighbour", "replace", f"10.{rail}.1.1", "lladdr", "02:00:00:00:00:01", "dev", f"rail{rail}")
            live.sendall(b"?")
            agent.queueing_ns[rail] = 20 * kit.MS
            assert live.recv(4096) == b"?", "by the other rail"
            assert talk.figure("retrans", live) > 0
            host.ip("neighbour", "delete", f"10.{rail}.1.1", "dev", f"rail{rail}")
            if end == "killed":
                controller.kill()
            elif end == "off":
                support.swerve("steer", "off", "-n", host.netns)
            else:
                controller.end()
            support.wait_until(lambda: host.ours() == 0, 20, "our rule is gone")
            assert not any("minimum RTO" in line for line in told(host))
        acts = [act for act in agent.acts if act.actuator == "rto_min"]
        assert [act.outcome for act in acts[:1]] == (["applied"] if wanted else [])
        assert host.others() == before and host.ours("route", "nexthop") == 0
        with contextlib.closing(talk.connect()) as new:
            talk.say(new, 100)
            assert talk.figure("rto", new) >= KERNELS_MS
