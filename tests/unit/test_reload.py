"""A configuration read again: what changes live, what waits for a restart, and how a source gives way to the next."""

from __future__ import annotations

import os
import selectors
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytools.agent import reload
from pytools.agent.reload import LIVE, Slot, plan
from pytools.config import AgentConfig, Clocks, HostBus, Links, Peer, Probe, Recording
from pytools.errors import SwerveError

SHARED = Peer("h2", "10.9.0.2", "shared")
OWN = Peer("h3", "10.9.0.3", "free_running")
OLD = AgentConfig("h1", [SHARED])


def test_nothing_new_changes_nothing() -> None:
    same = plan(OLD, msgspec.convert(msgspec.to_builtins(OLD), AgentConfig))
    assert (same.parts, same.changed, same.waiting, same.config) == ((), (), {}, OLD)
    two = [SHARED, Peer("h4", "10.9.0.4", "shared")]
    assert plan(replace(OLD, peers=two), replace(OLD, peers=two[::-1])).parts == (), "the order of peers is nothing new"


def test_what_can_change_does_and_what_cannot_is_said() -> None:
    new = AgentConfig(
        "h1", [SHARED, replace(SHARED, name="h4", address="10.9.0.4")], probe=Probe(interval_ms=5, dscp=8),
        links=Links(interval_ms=100, mtu_interval_s=9), recording=Recording(hours=1), clocks=Clocks(window_ms=900),
    )  # fmt: skip
    found = plan(OLD, new)
    assert set(found.parts) == {"peers", "links", "recording"}
    assert set(found.changed) == {"peers", "links.interval_ms", "recording.hours"}
    assert set(found.waiting) == {"probe.interval_ms", "probe.dscp", "links.mtu_interval_s", "clocks.window_ms"}
    assert found.config == replace(OLD, peers=new.peers, links=Links(interval_ms=100), recording=Recording(hours=1)), (
        "what waits is as it was"
    )
    assert set(found.taken({"links": "no room"})) == {"peers", "recording.hours"}
    assert found.holds({"links": "no room"}).links == OLD.links


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (OLD, [SHARED, OWN], "clock of its own"),
        (replace(OLD, bus=HostBus(key_file="/key")), [replace(SHARED, name="h9")], "bus between hosts"),
        (replace(OLD, peers=[OWN]), [SHARED, OWN], ""),
        (replace(OLD, peers=[OWN]), [SHARED], ""),
        (replace(OLD, peers=[]), [SHARED], ""),
    ],
)
def test_peers_that_a_mesh_cannot_take_wait(old: AgentConfig, new: list[Peer], why: str) -> None:
    found = plan(old, replace(old, peers=new))
    assert ("peers" in found.waiting) == bool(why) and why in found.waiting.get("peers", "")
    assert found.config.peers == (old.peers if why else new)


FIELDS = [
    (section, name)
    for section in ("probe", "windows", "clocks", "bus", "samples", "tcp", "links", "rdma", "gpu", "recording")
    for name in getattr(OLD, section).__struct_fields__
]


@given(st.sampled_from(FIELDS))
def test_every_field_is_taken_up_or_named(field: tuple[str, str]) -> None:
    section, name = field
    value: Any = getattr(getattr(OLD, section), name)
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else f"{value}x"
    new = replace(OLD, **{section: replace(getattr(OLD, section), **{name: other})})
    found = plan(OLD, new)
    dotted = f"{section}.{name}"
    assert (list(found.changed), list(found.waiting)) == (([dotted], []) if dotted in LIVE else ([], [dotted]))
    assert found.config == (new if dotted in LIVE else OLD)


def test_the_hosts_name_waits() -> None:
    assert list(plan(OLD, replace(OLD, host="h9")).waiting) == ["host"]


class Source:
    """Counts what happens to it; loses one thing a tick."""

    alive = 0

    def __init__(self, config: AgentConfig) -> None:
        if config.links.interval_ms == 13:
            raise SwerveError("no room")
        Source.alive += 1
        assert Source.alive == 1, "the one before is gone first"
        self.lost, (self.near, self.far) = 0, socket.socketpair()

    def register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self.near.fileno(), selectors.EVENT_READ, self)

    def tick(self, now_ns: int) -> int:
        self.lost += 1
        return now_ns + 5

    def drops(self) -> dict[str, int]:
        return {"lost": self.lost, "never": 0}

    def close(self) -> None:
        Source.alive -= 1
        self.near.close()
        self.far.close()
        self.lost += 10  # what could not be handed over at the end


def faster(interval_ms: float) -> AgentConfig:
    return replace(OLD, links=Links(interval_ms=interval_ms))


def test_a_slot_goes_on_with_another_source_and_forgets_no_loss() -> None:
    with selectors.DefaultSelector() as selector:
        keep, end = os.pipe()
        selector.register(keep, selectors.EVENT_READ)
        slot = Slot(Source, OLD)
        slot.register(selector)
        assert len(selector.get_map()) == 2 and slot.tick(100) == 105
        for number in range(3):
            slot.renew(faster(number + 20))
            assert len(selector.get_map()) == 2 and Source.alive == 1
            slot.tick(0)
        assert slot.drops() == {"lost": 4 + 3 * 10, "never": 0}
        with pytest.raises(SwerveError, match="no room"):
            slot.renew(faster(13))
        assert Source.alive == 1 and len(selector.get_map()) == 2, "the configuration before holds"
        slot.close()
        assert Source.alive == 0 and list(selector.get_map()) == [keep]
        os.close(keep)
        os.close(end)


def test_a_slot_may_be_empty() -> None:
    def make(config: AgentConfig) -> Source | None:
        return Source(config) if config.recording.hours else None

    slot = Slot(make, replace(OLD, recording=Recording(hours=0)))
    with selectors.DefaultSelector() as selector:
        slot.register(selector)
        assert slot.tick(7) > 1 << 60 and slot.drops() == {} and slot.source is None
        slot.renew(OLD)
        assert slot.tick(7) == 12 and slot.source is not None and slot.source.lost == 1
        slot.renew(replace(OLD, recording=Recording(hours=0)))
        assert Source.alive == 0 and slot.source is None and slot.drops() == {"lost": 11, "never": 0}
        slot.close()


def test_what_is_live_is_a_field() -> None:
    assert LIVE.keys() <= {f"{section}.{name}" for section, name in FIELDS} | {"peers"}
    assert reload.plan(OLD, OLD).taken({}) == []
