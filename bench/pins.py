"""What pins cost: nanoseconds of BPF run time a packet, net of an empty program, and how long a thousand take.

Two hosts joined by two unshaped veth pairs; traffic over the first. `no_pins`: nothing is steered. `miss`: a thousand
other flows are. `hit`: the flow is one of the thousand, and redirected to the second rail. `on_target`: it is pinned to
where routing sends it anyway, which is also what a redirected packet pays a second time, on the rail it went to. UDP
in packets of 1,400 bytes, over IPv4 and (`_ipv6`) IPv6; `_tcp` in buffers of up to 64 kB, of which each is one run.

`hold_other`: packets to another destination are held; `held`: these are, most of them.

`standby_armed`: stand-bys are armed, and no path was ever silent; `standby_alarm`: one is, but not this packet's.

`install`: a thousand pins checked, written and inserted; `renew` and `remove` the same thousand. `noticed`: from the
request that makes a neighbour fail in the kernel to the moment that its target counts as dead.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _common import ADDRESSES, DEVICE, Hook, Pair, emit, empty_program, median, note, per_run, run_times, veth_pair
from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.kernel.bpf import mapped, syscall
from pytools.kernel.bpf.attach import attach_tc
from pytools.kernel.bpf.loader import load
from pytools.kernel.bpf.syscall import RunTime
from pytools.kernel.netlink import neighbours
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab import wiring
from steering.actuators import flow_table
from steering.actuators.agent_paths import PrefixTable, prefix_key
from steering.actuators.flow_table import FlowTable
from steering.actuators.neighbours import Neighbours
from steering.actuators.pins import Pins, PinTarget
from steering.plan import FlowKey, Pin

ROUNDS, TRIALS = 7, 40
PINS = 1000
SECOND = "v1"
SECOND_ADDRESSES = (("10.78.0.1", "fd78::1"), ("10.78.0.2", "fd78::2"))
TCP, UDP = 6, 17
HOUR_NS = 3_600_000_000_000
DATAGRAMS, DATAGRAM_BYTES = 50_000, 1400
STREAM_BYTES, CHUNK_BYTES = 1 << 30, 1 << 20


def main() -> None:
    with two_rails() as pair, inside(pair.ends[0]), contextlib.ExitStack() as stack:
        rails = [
            PinTarget(10 * rail + version, rail, each[1][version])
            for rail, each in ((101, ADDRESSES), (103, SECOND_ADDRESSES))
            for version in (0, 1)
        ]
        noticing(rails[-1])  # before anybody else asks for that neighbour
        table = stack.enter_context(FlowTable(load([flow_table.PROGRAM])))
        pins = stack.enter_context(Pins(table))
        if (refused := pins.targets(rails)) or not pins.wait_alive(20):
            raise SwerveError(f"a rail is not ready: {refused}")
        table.attach(())  # where it is measured, it is attached with what it is compared with
        installing(pins)
        for suffix, open_flow in {"": datagrams, "_ipv6": datagrams6, "_tcp": stream}.items():
            with open_flow(pair) as (flow, work):
                run_time(pair, table, pins, flow, suffix, work)


def run_time(pair: Pair, table: FlowTable, pins: Pins, flow: FlowKey, suffix: str, work: Callable[[], object]) -> None:
    """All cases of one kind of packet."""
    hooks = {"steer": Hook(table.program_fd, pair.ends[0], DEVICE, "egress")}

    def beside() -> list[float]:
        return run_times(hooks, work, ROUNDS)["steer"]

    def pin(rail: int) -> Pin:
        return Pin(flow, "", 10 * rail + (":" in flow.remote), time.monotonic_ns() + HOUR_NS)

    report("no_pins" + suffix, beside())
    if not suffix:
        with armed(table) as agent:
            report("standby_armed", beside())
            agent["silence_ns"] = time.monotonic_ns() + HOUR_NS
            report("standby_alarm", beside())
    if suffix != "_tcp":
        hold_times(pair, table, flow, suffix, beside)
    pins.install(thousand())
    report("miss" + suffix, beside())
    refused = pins.install([pin(103)])
    figures = hit_times(pair, table, work)
    moved = pins.table.counters()["redirected"]
    refused |= pins.install([pin(101)])
    report("hit" + suffix, figures)
    report("on_target" + suffix, beside())
    counted = pins.read()[flow]
    note(f"{flow.remote} {flow.protocol}: {moved} packets redirected so far, {counted.packets} counted on their target")
    if refused or not moved or not counted.packets:
        raise SwerveError(f"not what was to be measured: {refused}")
    pins.remove(list(pins.read()))


def hold_times(pair: Pair, table: FlowTable, flow: FlowKey, suffix: str, beside: Callable[[], list[float]]) -> None:
    """With a hold for another destination, and for that of the packets; every packet is then held."""
    prefixes = PrefixTable(table.hold_prefixes)
    with inside(pair.ends[0]):
        index = socket.if_nametoindex(DEVICE)
    with armed(table) as agent, mapped.create("probe_paths", table.path_record, 4096) as paths:
        table.settings["standby_until_ns"], agent["silence_ns"] = 0, 0
        table.lent[1].update(0, paths.fd)
        far = time.monotonic_ns() + HOUR_NS
        paths.records["ifindex"][1], paths.records["queue_ns"][1] = index, 10_000_000_000
        paths.records["queue_sent_ns"][1] = time.monotonic_ns()
        table.holds["path"][0] = 1
        for name, value in {"until_ns": far, "threshold_ns": 1000, "longest_ns": 1 << 30, "fresh_ns": HOUR_NS}.items():
            table.holds["limits"][name][0] = value
        table.holds["limits"]["floor"][0], table.holds["limits"]["gain"][0] = 1024, 256
        table.settings["held_until_ns"] = far
        bits = 128 if ":" in flow.remote else 32
        prefixes.show({prefix_key(f"{'fd99::9' if bits == 128 else '10.99.0.9'}/{bits}", index): 0})
        report("hold_other" + suffix, beside())
        prefixes.show({prefix_key(f"{flow.remote}/{bits}", index): 0})
        before = table.counters()["held"]
        report("held" + suffix, beside())
        table.settings["held_until_ns"] = 0
        prefixes.show({})
        note(f"{flow.remote}: {table.counters()['held'] - before} packets held")


@contextlib.contextmanager
def armed(table: FlowTable) -> Iterator[NDArray[Any]]:
    """Stand-bys of an agent whose settings are given: they are for other destinations than that of the packets."""
    with (
        mapped.create("probe_settings", table.settings_record, 1) as settings,
        mapped.create("probe_paths", table.path_record, 4096) as paths,
    ):
        for place, lent in zip(table.lent, (settings, paths), strict=True):
            place.update(0, lent.fd)
        table.settings["standby_until_ns"] = time.monotonic_ns() + HOUR_NS
        try:
            yield settings.records
        finally:
            table.settings["standby_until_ns"] = 0
            for place in table.lent:
                place.delete(0)


Flow = tuple[FlowKey, Callable[[], object]]  # a flow from the first end to the second, and what sends some of it


@contextlib.contextmanager
def stream(pair: Pair) -> Iterator[Flow]:
    """A TCP connection, written in large pieces and read by a thread."""
    with inside(pair.ends[1]):
        server = socket.create_server((ADDRESSES[1][0], 0))
    with server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        chunk, room = bytes(CHUNK_BYTES), bytearray(CHUNK_BYTES)

        def read() -> None:
            while far.recv_into(room):
                pass

        reader = threading.Thread(target=read)
        reader.start()

        def work() -> None:
            for _ in range(STREAM_BYTES // CHUNK_BYTES):
                near.sendall(chunk)

        with far:
            yield FlowKey(TCP, *near.getsockname(), *near.getpeername()), work
            near.shutdown(socket.SHUT_WR)
            reader.join()


@contextlib.contextmanager
def datagrams(pair: Pair, version: int = 0) -> Iterator[Flow]:
    """UDP to a socket that nobody reads."""
    family = (socket.AF_INET, socket.AF_INET6)[version]
    with inside(pair.ends[1]):
        far = socket.socket(family, socket.SOCK_DGRAM)
    with far, socket.socket(family, socket.SOCK_DGRAM) as near:
        far.bind((ADDRESSES[1][version], 0))
        near.connect(far.getsockname()[:2])
        payload = bytes(DATAGRAM_BYTES)

        def work() -> None:
            for _ in range(DATAGRAMS):
                near.send(payload)

        yield FlowKey(UDP, *near.getsockname()[:2], *far.getsockname()[:2]), work


def datagrams6(pair: Pair) -> contextlib.AbstractContextManager[Flow]:
    """The same over IPv6."""
    return datagrams(pair, 1)


def report(case: str, figures: list[float]) -> None:
    unit = "ns/buffer" if case.endswith("_tcp") else "ns/packet"
    emit("pins", "run_time", median(figures), unit, "lower", case=case, n=len(figures))


def hit_times(pair: Pair, table: FlowTable, work: Callable[[], object]) -> list[float]:
    """As `run_times`, of a program that sends its packets elsewhere: the empty one sees them before it does in one
    round, and on the rail that they go to in the next.
    """
    found = []
    with empty_program() as empty:
        for turn in range(ROUNDS + 1):
            both = [(empty.programs["empty"], (DEVICE, SECOND)[turn % 2]), (table.program_fd, DEVICE)]
            with contextlib.ExitStack() as attached:
                for fd, device in reversed(both):
                    attached.enter_context(attach_tc(fd, device, "egress"))
                before = [syscall.program_run_time(fd) for fd, _ in both]
                with RunTime():
                    work()
                nothing, ours = (
                    per_run(was, syscall.program_run_time(fd)) for was, (fd, _) in zip(before, both, strict=True)
                )
            if turn:
                found.append(ours - nothing)
    return found


def installing(pins: Pins) -> None:
    """Each on its own, the table empty before."""
    times: dict[str, list[float]] = {"install": [], "renew": [], "remove": []}
    for turn in range(3 * ROUNDS + 1):
        wanted = thousand()
        flows = [pin.flow for pin in wanted]
        steps: dict[str, Callable[[], object]] = {
            "install": lambda wanted=wanted: pins.install(wanted),
            "renew": lambda flows=flows: pins.renew(flows, time.monotonic_ns() + HOUR_NS),
            "remove": lambda flows=flows: pins.remove(flows),
        }
        for name, step in steps.items():
            begin_ns = time.perf_counter_ns()
            step()
            if turn:
                times[name].append((time.perf_counter_ns() - begin_ns) / 1e6)
            if name == "install" and len(pins.read()) != PINS:
                raise SwerveError(f"{len(pins.read())} of {PINS} pins are in the kernel")
    for name, figures in times.items():
        emit("pins", name, median(figures), "ms", "lower", case=f"pins{PINS}", n=len(figures))


def noticing(target: PinTarget) -> None:
    """Busy waiting would hold the other thread up: it says itself when it knew."""
    known: queue.SimpleQueue[tuple[bool, int]] = queue.SimpleQueue()
    times = []
    with Netlink() as netlink, Neighbours(lambda hop, alive: known.put((alive, time.perf_counter_ns()))) as watching:
        watching.watch([target.hop])
        for _ in range(TRIALS):
            if not watching.wait_alive([target.hop], 20):
                raise SwerveError(f"{target.gateway} does not answer")
            while not known.empty():
                known.get()
            begin_ns = time.perf_counter_ns()
            neighbours.give_up(netlink, *target.hop)
            alive, at_ns = known.get(timeout=20)
            if alive:
                raise SwerveError("not what was to be measured")
            times.append((at_ns - begin_ns) / 1e6)
            known.get(timeout=20)  # asked again, and back
    emit("pins", "noticed_p50", median(times), "ms", "lower", n=TRIALS)
    emit("pins", "noticed_p95", statistics.quantiles(times, n=20)[-1], "ms", "lower", n=TRIALS)


def thousand() -> list[Pin]:
    """Pins of flows that nobody sends, on the second rail."""
    until = time.monotonic_ns() + HOUR_NS
    flows = (FlowKey(TCP, "10.77.0.1", 10_000 + n, "10.77.0.2", 443) for n in range(PINS))
    return [Pin(flow, "", 1030, until) for flow in flows]


@contextlib.contextmanager
def two_rails() -> Iterator[Pair]:
    """The pair, and a second way between its ends."""
    with veth_pair() as pair:
        with Netlink(pair.ends[0]) as netlink:
            wiring.add_veth(netlink, wiring.End(SECOND, 103), wiring.End(SECOND, 104), pair.ends[1])
        for end, index, addresses in zip(pair.ends, (103, 104), SECOND_ADDRESSES, strict=True):
            with Netlink(end) as netlink:
                for address, length in zip(addresses, (24, 64), strict=True):
                    wiring.add_address(netlink, index, address, length)
                wiring.set_up(netlink, index)
            with inside(end):
                for name in ("all", "default", DEVICE, SECOND):
                    Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
        yield pair


if __name__ == "__main__":
    main()
