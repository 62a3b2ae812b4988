"""observe.c and its parts: what is attached, and how packets are handed on where a kernel refused one of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import packets as p
import pytest
from packet_runs import PacketRuns

from pytools.agent.hooks import link_observers
from pytools.config import AgentConfig, Tcp
from pytools.kernel.bpf import loader
from pytools.sources import programs

UNSPEC = 0xFFFFFFFF
RST = 0x04
TOGETHER = (("observe_egress", "egress"), ("observe_ingress", "ingress"))


@pytest.fixture
def loaded() -> Iterator[loader.Loaded]:
    config = AgentConfig("", [])
    parts = [programs.probes(config), programs.tcp_connections(Tcp(flows=1024)), programs.samples(config)]
    with loader.load(programs.observers(*parts)) as found:
        assert found.failed == {}
        whole = dict(found.programs)
        try:
            yield found
        finally:
            found.programs.update(whole)


def refuse(loaded: loader.Loaded, *names: str) -> None:
    """As if this kernel had refused these."""
    for name in names:
        del loaded.programs[name]


def test_a_hook_has_one_program(loaded: loader.Loaded) -> None:
    assert link_observers(loaded) == TOGETHER


def test_where_it_is_refused_its_parts_are_programs_of_their_own(loaded: loader.Loaded) -> None:
    refuse(loaded, "observe_egress", "tcp_ingress")
    parts = ("probe_egress", "tcp_egress", "sample_egress")
    assert link_observers(loaded) == (*((part, "egress") for part in parts), TOGETHER[1])


@pytest.mark.parametrize("refused", [(), ("tcp",), ("probe", "tcp")], ids=lambda names: "-".join(names) or "none")
@pytest.mark.parametrize(("hook", "direction"), TOGETHER)
def test_a_part_that_is_not_there_is_passed_over(
    loaded: loader.Loaded, hook: str, direction: str, refused: tuple[str, ...]
) -> None:
    refuse(loaded, *(f"{name}_{direction}" for name in refused))
    link_observers(loaded)
    ring, peers = loaded.ring("samples", "sample"), loaded.map("sample_peers")
    loaded.map("sample_settings").update(0, (3, 0, 0, 0))  # both directions, everything
    for address in ("10.9.0.1", "10.9.0.2"):
        key = np.zeros((), peers.key)
        key["bytes"] = np.frombuffer(p.mapped(address), np.uint8)
        peers.update(key, 3)
    head = struct.pack("!HHIIBBHHH", 5000, 6000, 1, 0, 5 << 4, RST, 0, 0, 0)
    plain = p.ipv4(head + bytes(1), protocol=p.TCP)
    tagged = p.ipv4(head + bytes(1), protocol=p.TCP, tags=next(tags for tags in p.TAGS.values() if tags))
    for frame in (plain, tagged):  # wanted by tcp.c; looked at by all of them
        assert PacketRuns().run(loaded.programs[hook], frame).verdict == UNSPEC
        assert len(ring.read()) == 1
