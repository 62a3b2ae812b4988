"""Beside programs of others at TC that end a packet's way there with TC_ACT_OK, as Cilium's do: all see all packets.

They are attached as Cilium 1.18 does (pkg/datapath/loader): as TCX behind all programs, replaced by an update of the
link; or as clsact filters with handle 1, here of a priority behind ours (its `bpf-filter-priority`). Calico's clsact
filters have a priority behind ours by themselves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import node_objects
import pin_kit
import pytest
import support
from pin_kit import Wire, compiled_once, rails
from probe_kit import ADDRESSES, Hosts, hosts, two
from pyroute2 import IPRoute

from pytools.agent.hooks import Hooks
from pytools.kernel import features
from pytools.kernel.bpf import loader, syscall
from pytools.kernel.netns import inside
from pytools.sources import programs

__all__ = ["compiled_once", "hosts", "rails"]  # fixtures

PROBES, DATAGRAMS = 40, 50
NODE = os.environ.get("SWERVE_TEST_NODE")  # Cilium's or Calico's objects: their programs take the place of empty ones
_LINK_UPDATE = 29
_BEHIND_OURS = 30000
_PARENTS = {"ingress": 0xFFFFFFF2, "egress": 0xFFFFFFF3}
_TCX = {"ingress": syscall.TCX_INGRESS, "egress": syscall.TCX_EGRESS}
MECHANISMS = pytest.mark.parametrize("mechanism", ["tcx", pytest.param("clsact", marks=pytest.mark.guest)])


class Theirs:
    """Their programs in both directions of an interface, which count packets and let them pass."""

    def __init__(self, netns: str, address: str, mechanism: str, interface: str = "v0") -> None:
        self._netns, self._address, self._mechanism, self._interface = netns, address, mechanism, interface
        self._closing = contextlib.ExitStack()
        self.programs: dict[str, int] = {}
        self._links: dict[str, int] = {}
        with inside(netns):
            self._index = socket.if_nametoindex(interface)
            if mechanism == "clsact":
                with IPRoute() as ip, contextlib.suppress(Exception):  # Cilium replaces a clsact that is there
                    ip.tc("add", "clsact", self._index)
        self.replace()

    def replace(self) -> None:
        """Attach programs, in the place of those that there are."""
        for direction, fd in self._loaded().items():
            with inside(self._netns):
                replace = self._replace_filter if self._mechanism == "clsact" else self._replace_link
                replace(direction, fd)
            self.programs[direction] = fd

    def _loaded(self) -> dict[str, int]:
        """New programs: empty ones, unless objects are named."""
        if not NODE:
            return {each: self._closing.enter_context(features.loaded(features.NOTHING)) for each in _PARENTS}
        with inside(self._netns):
            made = node_objects.Node(Path(NODE), self._interface, self._address)
        return self._closing.enter_context(contextlib.closing(made)).fds

    def _replace_filter(self, direction: str, fd: int) -> None:
        with IPRoute() as ip:
            name, parent = f"cil_{direction}-{self._interface}", _PARENTS[direction]
            where = {"parent": parent, "prio": _BEHIND_OURS, "protocol": 3, "classid": 1}
            ip.tc("replace-filter", "bpf", self._index, 1, fd=fd, name=name, direct_action=True, **where)

    def _replace_link(self, direction: str, fd: int) -> None:
        if direction in self._links:
            syscall.bpf(_LINK_UPDATE, struct.pack("<4I", self._links[direction], fd, 0, 0))
            return
        link = syscall.create_tcx_link(fd, self._index, _TCX[direction], last=True)
        assert link is not None
        self._links[direction] = link
        self._closing.callback(os.close, link)

    def runs(self) -> dict[str, int]:
        """How often each has run while the kernel counts."""
        return {direction: syscall.program_run_time(fd)[1] for direction, fd in self.programs.items()}

    def close(self) -> None:
        self._closing.close()


@pytest.fixture
def theirs(mechanism: str) -> Iterator[list[Theirs]]:
    if mechanism == "tcx":
        with features.loaded(features.NOTHING) as fd:
            if not syscall.has_tcx(fd):
                pytest.skip("missing: TCX (Linux 6.6)")
    made: list[Theirs] = []
    yield made
    for each in made:
        each.close()


def exchanged(ends: tuple[str, str], theirs: Theirs) -> dict[str, int]:
    """Send datagrams to the first end and back; how many of ten each of its programs has seen, neighbours aside."""
    sockets = []
    for netns, address in zip(ends, ADDRESSES[4], strict=True):
        with inside(netns):
            sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sockets[-1].settimeout(10)
        sockets[-1].bind((address, 0))
    with syscall.RunTime():
        before = theirs.runs()
        for sender, receiver in (sockets, sockets[::-1]):
            for _ in range(DATAGRAMS):
                sender.sendto(b"x", receiver.getsockname())
                assert receiver.recv(9) == b"x"
        after = theirs.runs()
    for each in sockets:
        each.close()
    return {direction: (after[direction] - before[direction]) // DATAGRAMS for direction in after}


@pytest.mark.parametrize("order", ["they first", "we first"])
@MECHANISMS
def test_probes_pass_and_they_see_all_packets_in_either_order_and_when_replaced(
    hosts: Hosts, veth_pair: tuple[str, str], theirs: list[Theirs], mechanism: str, order: str
) -> None:
    def attach_theirs() -> None:
        ends = zip(veth_pair, ADDRESSES[4], strict=True)
        theirs.extend(Theirs(netns, address, mechanism) for netns, address in ends)

    if order == "they first":
        attach_theirs()
    first, second = two(hosts, veth_pair, 4, force_clsact=mechanism == "clsact")
    if order == "we first":
        attach_theirs()
    for times in (1, 2):
        first.send(4, PROBES)
        first.records(PROBES)
        assert first.counted() == {"recorded": times * PROBES}
        assert second.counted() == {"reflected": times * PROBES}
        assert exchanged(veth_pair, theirs[0]) == {"ingress": 1, "egress": 1}
        for each in theirs:
            each.replace()
    first.close()
    assert exchanged(veth_pair, theirs[0]) == {"ingress": 1, "egress": 1}, "ours are gone, and theirs are not"


@pytest.mark.parametrize("order", ["they first", "we first"])
@MECHANISMS
def test_pins_act_and_they_see_the_packets_where_they_leave(
    rails: pin_kit.Rails, theirs: list[Theirs], mechanism: str, order: str
) -> None:
    def attach_theirs() -> None:
        theirs.extend(Theirs(rails.near, pin_kit.NEAR[0], mechanism, f"rail{rail}") for rail in (1, 2))

    if order == "they first":
        attach_theirs()
    with pin_kit.pinning(rails, force_clsact=mechanism == "clsact") as pins, Wire(rails) as wire, syscall.RunTime():
        if order == "we first":
            attach_theirs()
        routed = wire.send()[0]
        for pinned in (False, True):
            if pinned:
                pins.install([pin_kit.pin(wire.flow, 3 - routed)])
            rail = 3 - routed if pinned else routed
            before = [each.runs()["egress"] for each in theirs]
            assert {wire.send()[0] for _ in range(DATAGRAMS)} == {rail}
            seen = [each.runs()["egress"] - count for each, count in zip(theirs, before, strict=True)]
            assert [count // DATAGRAMS for count in seen] == [int(rail == each) for each in (1, 2)]


@pytest.mark.guest
def test_observers_that_others_remove_with_all_filters_come_back(
    veth_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Cilium does when it leaves an interface, and Calico when it is switched off; links of TCX stay."""
    monkeypatch.setattr(syscall, "create_tcx_link", lambda *_: None)
    tc = ["tc", "-n", veth_pair[0]]

    def filters() -> list[bool]:
        shown = [support.run([*tc, "filter", "show", "dev", "v0", each], check=False).stdout for each in _PARENTS]
        return ["swerve" in each for each in shown]

    wanted = programs.Program("probe.c", ("probe_egress", "probe_ingress"))
    with inside(veth_pair[0]), loader.load([wanted]) as loaded, contextlib.closing(Hooks(loaded, lambda: ["v0"])) as on:
        on.tick(0)
        assert filters() == [True, True]
        support.run([*tc, "filter", "del", "dev", "v0", "egress"])
        assert filters() == [True, False]
        on.tick(0)
        assert filters() == [True, True]
        support.run([*tc, "qdisc", "del", "dev", "v0", "clsact"])
        on.tick(0)
        assert filters() == [True, True]
    assert filters() == [False, False]


@pytest.mark.guest
def test_pins_act_again_when_others_have_removed_all_filters(rails: pin_kit.Rails) -> None:
    with pin_kit.pinning(rails, force_clsact=True) as pins, Wire(rails) as wire:
        routed, _ = wire.send()
        pins.install([pin_kit.pin(wire.flow, 3 - routed)])
        assert wire.send()[0] == 3 - routed
        support.run(["tc", "-n", rails.near, "qdisc", "del", "dev", f"rail{routed}", "clsact"])
        assert wire.send()[0] == routed
        with inside(rails.near):
            pins.table.mend()
        assert wire.send()[0] == 3 - routed
