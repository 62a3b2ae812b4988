"""RDMA ports on real Soft-RoCE over a veth: state, counters and GIDs, through a flap and a change of address.

Runs where the kernel has Soft-RoCE: in the second kernel (tests/vm).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
import rdma_kit
import support
from link_watch import Watching, watching

from pytools.config import Links
from pytools.signals import LinkEvent
from pytools.signals import Path as NetworkPath

pytestmark = pytest.mark.guest(only=True)

PORT = Path("/sys/class/infiniband/rxe7/ports/1")
PATH = NetworkPath("h1", "h2", "10.77.9.2", "", "vrdma0")


@pytest.fixture
def soft_roce() -> Iterator[None]:
    """A veth pair in the namespace that /sys shows, a device of Soft-RoCE on one end."""
    if words := rdma_kit.missing():
        pytest.skip(f"missing: {words}")
    ip = ["ip", "link"]
    support.run([*ip, "add", "vrdma0", "address", "02:00:00:00:79:01", "type", "veth", "peer", "name", "vrdma1"])
    try:
        support.run(["ip", "address", "add", "10.77.9.1/24", "dev", "vrdma0"])
        for name in ("vrdma0", "vrdma1"):
            support.run([*ip, "set", name, "up"])
        support.run(["rdma", "link", "add", "rxe7", "type", "rxe", "netdev", "vrdma0"])
        support.wait_until(lambda: len(kernel_gids()) >= 2, 10, "the kernel has made the port's GIDs")
        yield
        support.run(["rdma", "link", "delete", "rxe7"], check=False)
    finally:
        support.run([*ip, "del", "vrdma0"])


def kernel_gids() -> dict[str, str]:
    """Index and address of every GID, as the kernel shows them."""
    texts = {place.name: place.read_text().strip() for place in (PORT / "gids").iterdir()}
    addresses = {index: ipaddress.IPv6Address(text) for index, text in texts.items()}
    return {index: str(each.ipv4_mapped or each) for index, each in addresses.items() if int(each)}


def gids_told(work: Watching) -> dict[str, str]:
    """The same as the source tells it, without the types."""
    work.ports.clear()
    work.until(lambda: work.ports, "the port is told")
    return {index: text.split()[0] for index, text in work.ports[-1].gids.items()}


@pytest.mark.deadline(240)
def test_a_port_and_what_becomes_of_its_gids(soft_roce: None) -> None:
    with watching(None, lambda: ["vrdma0"], lambda: [PATH], Links(interval_ms=100)) as work:
        work.until(lambda: work.ports, "the port is told")
        port = work.ports[-1]
        assert (port.device, port.port, port.interface, port.state) == ("rxe7", 1, "vrdma0", "active")
        assert port.rate == (PORT / "rate").read_text().strip()
        assert all(text.split(maxsplit=1)[1] == "RoCE v2" for text in port.gids.values())
        agree(work)
        assert "10.77.9.1" in gids_told(work).values()
        files = {place.name: place for place in (PORT / "hw_counters").iterdir() if place.name != "lifespan"}
        assert files.keys() <= port.counters.keys()
        assert port.out_of_sequence == port.counters["out_of_seq_request"]
        assert port.timeouts == port.counters["retry_exceeded_err"]
        assert port.receiver_not_ready == port.counters["rcvd_rnr_err"] + port.counters["send_rnr_err"]
        assert port.cnp_received is None

        # The address of an index becomes another one: connections that name the index end up elsewhere.
        (index,) = (index for index, address in kernel_gids().items() if address == "10.77.9.1")
        support.run(["ip", "address", "del", "10.77.9.1/24", "dev", "vrdma0"])
        support.run(["ip", "address", "add", "10.77.9.7/24", "dev", "vrdma0"])
        work.until(lambda: any("10.77.9.7" in each.detail for each in gid_events(work)), "the new GID is told")
        words = " ".join(each.detail for each in gid_events(work))
        assert f"index {index}: 10.77.9.1 RoCE v2 → " in words
        assert all((each.interface, each.paths) == ("vrdma0", [PATH]) for each in gid_events(work))
        agree(work)

        # A flap: the kernel takes an IPv6 address away with the link, and its GID, and gives neither back.
        support.run(["ip", "address", "add", "fd77:9::1/64", "dev", "vrdma0", "nodad"])
        work.until(lambda: "fd77:9::1" in gids_told(work).values(), "the IPv6 address has a GID")
        (index,) = (index for index, address in kernel_gids().items() if address == "fd77:9::1")
        work.events.clear()
        support.run(["ip", "link", "set", "vrdma0", "down"])
        down = work.event("port_down", "vrdma0")
        assert (down.values["port"], down.paths) == (1, [PATH])
        vanished = told(work, f"index {index}: fd77:9::1 RoCE v2 → gone")
        assert vanished.values["vanished"] >= 1
        support.run(["ip", "link", "set", "vrdma0", "up"])
        work.event("port_up", "vrdma0")
        work.event("flap", "vrdma0")
        agree(work)
        assert "fd77:9::1" not in kernel_gids().values()
        work.events.clear()
        support.run(["ip", "address", "add", "fd77:9::1/64", "dev", "vrdma0", "nodad"])
        told(work, "fd77:9::1 RoCE v2")
        agree(work)

        work.events.clear()
        support.run(["rdma", "link", "delete", "rxe7"])
        assert "gone" in work.event("port_down", "vrdma0").detail


def agree(work: Watching) -> None:
    """Wait until the GIDs that are told are the kernel's; its table changes a moment after the addresses."""
    work.until(lambda: gids_told(work) == kernel_gids(), "the GIDs told are the kernel's")


def told(work: Watching, words: str) -> LinkEvent:
    """Wait for a change of GIDs with these words."""
    found: LinkEvent = work.until(
        lambda: next((each for each in gid_events(work) if words in each.detail), None), f"it is told: {words}"
    )
    return found


def gid_events(work: Watching) -> list[LinkEvent]:
    return [each for each in work.events if each.what == "gid_changed"]
