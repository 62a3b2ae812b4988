"""SIGHUP: other peers and a recorder of another size without a probe lost, and what waits for a restart is said."""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import service_kit as kit
import support
from service_kit import Service

from pytools.ipc.bus import Client
from pytools.signals import PathDelay, ProbeSamples, Self

# Many probes in a short time. Without a processor for a second, the other agent answers late: that is no loss by ours.
CONFIG = kit.CONFIG + "probe: {interval: 5ms, timeout: 10s}\n"
THIRD = CONFIG.replace("shared}]", "shared}, {name: three, address: 10.77.0.3, clock: shared}]")
TURNED = """\
host: two
peers: [{name: one, address: 10.77.0.1, clock: shared}]
recording: {retention: 0s}
"""


class Watcher:
    """Hears every probe of every path."""

    def __init__(self, service: Service) -> None:
        path = Path(service.env["SWERVE_RUNTIME_DIR"]) / "host/agent.sock"
        self.client = Client(path, frozenset({"probe_samples", "path_delay", "self"}))
        self.seqs: dict[str, list[int]] = {}  # of those that were answered
        self.delays: list[PathDelay] = []
        self._told: Self | None = None
        self._from_ns = time.monotonic_ns()  # what was sent before may be told of later
        self._late = self._late_by_now()
        self._from_ns = time.monotonic_ns()
        self.seqs.clear()

    def hear(self) -> Watcher:
        for each in self.client.read():
            if isinstance(each, ProbeSamples):
                told = zip(each.seq, each.sent_ns, each.forward_ns, strict=True)
                answered = [seq for seq, sent_ns, ns in told if ns is not None and sent_ns > self._from_ns]
                self.seqs.setdefault(each.path.destination, []).extend(answered)
            elif isinstance(each, PathDelay):
                self.delays.append(each)
            elif isinstance(each, Self):
                self._told = each
        return self

    def close(self) -> None:
        self.client.close()

    def _late_by_now(self) -> int:
        """How many sends the agent has left out, having had no processor for as long as a probe may wait."""
        now_ns = time.monotonic_ns()
        support.wait_until(lambda: (told := self.hear()._told) and told.at_ns > now_ns, 20, "it counts its losses")
        assert self._told is not None
        return self._told.drops["probe_missed_sends"]

    def all_answered(self, destination: str) -> bool:
        """Whether every probe that left was answered once, in order; of those in between all were counted."""
        support.wait_until(lambda: len(self.hear().seqs.get(destination, [])) > 1, 30, "two are answered")
        steps = [two - one for one, two in itertools.pairwise(self.seqs[destination])]
        return min(steps) > 0 and sum(steps) - len(steps) <= self._late_by_now() - self._late


@pytest.fixture(scope="module")
def settled(lasting_veth_pair: tuple[str, str], unique_name: Callable[[], str]) -> Iterator[Service]:
    """An agent that has probed another for a while, the same for all tests."""
    support.require("bcc", "tracefs", "ip")
    first, second = lasting_veth_pair
    support.run(["ip", "-n", second, "address", "add", "10.77.0.3/24", "dev", "v0"])
    with contextlib.ExitStack() as stack:
        room = stack.enter_context(kit.make_room(unique_name()))
        for name in ("a", "b"):
            (room / name).mkdir(mode=0o755)
        one = stack.enter_context(kit.service(room / "a", first, CONFIG))
        two = stack.enter_context(kit.service(room / "b", second, TURNED))
        one.manager.until("READY=1")
        two.manager.until("READY=1")
        with contextlib.closing(Watcher(one)) as watcher:
            support.wait_until(lambda: len(watcher.hear().seqs.get("two", [])) > 100, 30, "probes are answered")
        yield one


@pytest.fixture
def measuring(settled: Service) -> Iterator[tuple[Service, Watcher]]:
    """It, with its first configuration, and whatever it says from now on."""
    reload(settled, CONFIG)
    settled.forget()
    with contextlib.closing(Watcher(settled)) as watcher:
        support.wait_until(more(watcher, "two", 0), 30, "it measures")
        yield settled, watcher


def reload(service: Service, config: str) -> None:
    service.config.write_text(config)
    service.manager.forget()
    service.process.send_signal(signal.SIGHUP)
    service.manager.until("READY=1", 20)
    heard = service.manager.heard
    assert heard.index("RELOADING=1") < heard.index("READY=1")
    assert any(line.startswith("MONOTONIC_USEC=") for line in heard)


def more(watcher: Watcher, destination: str, count: int = 100) -> Callable[[], bool]:
    before = len(watcher.hear().seqs.get(destination, []))
    return lambda: len(watcher.hear().seqs.get(destination, [])) > before + count


def test_a_peer_comes_and_goes_and_no_probe_of_the_other_is_lost(measuring: tuple[Service, Watcher]) -> None:
    one, watcher = measuring
    for _ in range(3):
        reload(one, THIRD)
        support.wait_until(more(watcher, "three"), 30, "the new peer is probed")
        known = [each for each in watcher.delays if each.path.destination == "three"]
        assert any(None not in (each.forward.owd_p50_ns, each.reverse.owd_p50_ns) for each in known)
        reload(one, CONFIG)
        support.wait_until(more(watcher, "two"), 30, "the old one is probed on")
        seen = len(watcher.seqs["three"])
        support.wait_until(more(watcher, "two"), 30, "and on")
        assert len(watcher.seqs["three"]) <= seen + 240, "what was under way, and nothing more"
        watcher.seqs["three"].clear()
    assert watcher.all_answered("two")
    assert watcher.client.dropped == 0
    assert one.said().count("configuration read again changed=peers") == 6


def test_a_peer_of_another_family_is_taken_up(measuring: tuple[Service, Watcher]) -> None:
    one, watcher = measuring
    reload(one, CONFIG.replace("shared}]", "shared}, {name: six, address: 'fd77::2', clock: shared}]"))
    support.wait_until(
        lambda: any(each.path.destination == "six" for each in watcher.hear().delays), 30, "it is probed"
    )
    assert watcher.all_answered("two")
    assert "fwmark" not in support.run(["ip", "-6", "-n", _netns(one), "rule"]).stdout, "measuring makes no rule"
    reload(one, CONFIG)
    heard = sum(each.path.destination == "six" for each in watcher.hear().delays)
    support.wait_until(more(watcher, "two"), 30, "the old one is probed on")
    support.wait_until(more(watcher, "two"), 30, "and on")
    assert sum(each.path.destination == "six" for each in watcher.hear().delays) <= heard + 2, "the new one is not"


def test_the_recorder_changes_and_nothing_is_lost(measuring: tuple[Service, Watcher]) -> None:
    one, watcher = measuring
    folder = Path(one.env["SWERVE_STATE_DIR"]) / "host/recording"
    assert list(folder.iterdir())
    reload(one, CONFIG.replace("fine: 1MiB", "retention: 0s"))
    files = sorted(folder.iterdir())
    sizes = [each.stat().st_size for each in files]
    support.wait_until(more(watcher, "two"), 30, "it measures on")
    assert [each.stat().st_size for each in files] == sizes and sorted(folder.iterdir()) == files
    reload(one, CONFIG)
    support.wait_until(lambda: len(list(folder.iterdir())) > len(files), 20, "it records again")
    assert watcher.all_answered("two")


def test_what_cannot_change_live_is_said_and_stays(measuring: tuple[Service, Watcher]) -> None:
    one, watcher = measuring
    reload(one, CONFIG.replace("interval: 5ms", "interval: 4ms") + "links: {interval: 100ms}\n")
    one.manager.until("STATUS=probes 1 paths to 1 peers by 1 interfaces; waiting for a restart: probe.interval", 20)
    assert "<4>not taken up field=probe.interval" in one.said()
    assert "configuration read again changed=links.interval" in one.said()
    reload(one, CONFIG)
    assert "changed=links.interval\n" in one.said().rpartition("configuration read again ")[2]
    assert watcher.all_answered("two")


@pytest.mark.parametrize("config", ["host: [", "host: one\npeers: [{name: x, address: nowhere}]\n", "hosts: one\n"])
def test_a_wrong_configuration_changes_nothing(measuring: tuple[Service, Watcher], config: str) -> None:
    one, watcher = measuring
    reload(one, config)
    assert "<3>configuration not taken up" in one.said()
    support.wait_until(more(watcher, "two"), 30, "it measures on")
    assert watcher.all_answered("two") and one.process.poll() is None


def _netns(service: Service) -> str:
    found = support.run(["ip", "netns", "identify", str(service.process.pid)]).stdout.split()
    return next(name for name in found if name.startswith("swerve-"))
