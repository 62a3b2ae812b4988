"""Proof: what is said of TCP is exact, and no less than bcc's tcpretrans says.

    python tests/prove/tcp_exact.py [--transfers 20] [--connections 100000] [--rows 4096] [--seed N]

First, mixed lossy transfers (families, rails, streams, sizes, rates, queues and faults at random) with tcpretrans
alongside: per connection, segments and bytes retransmitted against `ss -ti`, timeouts against TCP_INFO, events against
tcpretrans; for the host, segments, timeouts and causes against the kernel's counters. Then many short connections with
a table that holds only some of them, over a rail that loses one packet in two thousand: totals exact, evictions as
counted, nothing put off. Prints JSON Lines: one per transfer, one per part; exits with 1 if anything differs. Run as
root, from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tcp_kit as kit  # noqa: E402
import tcpretrans  # noqa: E402

from pytools.kernel.netns import inside  # noqa: E402
from pytools.lab import Lab  # noqa: E402
from pytools.signals import TcpFlow  # noqa: E402

RATES = ("50mbit", "200mbit", "400mbit", "1gbit")
FIRST_PORT, SERVER_PORTS = 600, 16
FIRST_LOCAL, LOCAL_PORTS = 2000, 60_000
MESSAGE_BYTES = 100
LOST_SHARE = 1 / 2000
QUEUES = (15_000, 40_000, 100_000)


@dataclass
class Transfer:
    """One of the mixed transfers: its open connections, and how it was made."""

    pairs: list[tuple[socket.socket, socket.socket]]
    described: dict[str, object]


def say(**line: object) -> None:
    print(json.dumps({"proof": "tcp_exact", **line}), flush=True)


def one_transfer(lab: Lab, chance: random.Random, keep: contextlib.ExitStack) -> Transfer:
    """Make a transfer at random; its connections stay open."""
    address, rail = chance.choice((kit.RECEIVER, kit.RECEIVER6)), chance.choice((1, 2))
    rate, queue, streams = chance.choice(RATES), chance.choice(QUEUES), chance.choice((1, 1, 2, 4))
    size, chunk = chance.choice((2, 5, 15)) * kit.MEGABYTE, chance.choice((1300, 20_000, 1 << 16))
    cut = chance.random() < 0.4
    kit.route_over(lab, rail)
    for number in (1, 2):
        lab.congest(number, rate, queue_bytes=queue)
    with kit.listener(lab, address) as server:
        pairs = [keep.enter_context(kit.connected(lab, server)) for _ in range(streams)]
    mender = threading.Timer(0.2, lambda: mend_after_a_cut(lab, rail, rate, queue))
    if cut:  # long enough for timeouts that follow each other
        mender.start()
    kit.transfer(pairs, size, chunk)
    if cut:
        mender.join()
    return Transfer(
        pairs,
        {"address": address, "rail": rail, "rate": rate, "queue_bytes": queue, "streams": streams}
        | {"size_bytes": size, "chunk_bytes": chunk, "cut": cut},
    )


def mend_after_a_cut(lab: Lab, rail: int, rate: str, queue: int) -> None:
    lab.blackhole(rail, (1, 2))
    time.sleep(0.9)
    lab.heal(rail)
    lab.congest(rail, rate, queue_bytes=queue)


def compare(
    transfer: Transfer, flows: dict[int, TcpFlow], by_ss: dict[int, kit.SsCounts], peer: dict[tcpretrans.Flow, int]
) -> dict[str, object]:
    """One transfer's figures: ours, the kernel's, tcpretrans', and whether they agree."""
    ours = kernel = events = ours_bytes = kernel_bytes = timeouts = kernel_timeouts = 0
    exact, fewer, probes = True, False, 0
    for near, _ in transfer.pairs:
        local, remote = near.getsockname()[:2], near.getpeername()[:2]
        flow, ss, told = flows[local[1]], by_ss[local[1]], kit.timeouts_of(near)
        seen = peer.get((local[0], local[1], remote[0], remote[1]), 0)
        exact &= (flow.retransmitted_segments, flow.retransmitted_bytes) == (ss.segments, ss.bytes)
        exact &= told is None or flow.timeouts == told
        fewer |= flow.retransmitted_segments < seen
        ours, kernel, events = ours + flow.retransmitted_segments, kernel + ss.segments, events + seen
        ours_bytes, kernel_bytes = ours_bytes + flow.retransmitted_bytes, kernel_bytes + ss.bytes
        probes += flow.retransmitted.tail_probe
        timeouts, kernel_timeouts = timeouts + flow.timeouts, kernel_timeouts + (told or 0)
    return {
        **{"segments": ours, "ss_segments": kernel, "bytes": ours_bytes, "ss_bytes": kernel_bytes},
        **{"timeouts": timeouts, "tcp_info_timeouts": kernel_timeouts, "tcpretrans_events": events},
        **{"tail_probes": probes, "exact": exact, "fewer_than_tcpretrans": fewer},
    }


def mixed(transfers: int, chance: random.Random) -> bool:
    """The first part."""
    with Lab.up(f"prove-tcp-{os.getpid()}", hosts=2, rails=2, rate="400mbit") as lab, contextlib.ExitStack() as keep:
        namespace = kit.sender(lab)
        stop = keep.enter_context(tcpretrans.counting())
        with kit.watching(namespace) as watch:
            before = kit.nstat(namespace)
            made = [one_transfer(lab, chance, keep) for _ in range(transfers)]
            kit.until(lambda: kit.all_acknowledged(namespace), "all is acknowledged")
            flows, by_ss, peer = watch.flows(5), kit.ss_counts(namespace), stop()
            host, kernel = watch.host(), kit.nstat(namespace)
            lost = watch.source.drops()
            results = [compare(each, flows, by_ss, peer) for each in made]
    grown = {name: value - before.get(name, 0) for name, value in kernel.items()}
    for number, (each, result) in enumerate(zip(made, results, strict=True), start=1):
        say(transfer=number, **each.described, **result)
    by_cause = {name: getattr(host.retransmitted, name) for name in host.retransmitted.__struct_fields__}
    timers = host.timeouts - host.retransmitted.syn
    agree = {
        "segments": host.retransmitted_segments == grown["TcpRetransSegs"],
        "timeouts": host.timeouts == grown["TcpExtTCPTimeouts"],
        "fast": host.retransmitted.fast == grown["TcpExtTCPFastRetrans"],
        "timeout": host.retransmitted.timeout == grown["TcpExtTCPSlowStartRetrans"] + timers,
        "syn": host.retransmitted.syn == grown["TcpExtTCPSynRetrans"],
        "unknown": host.retransmitted.unknown == 0,
    }
    passed = all(agree.values()) and all(each["exact"] and not each["fewer_than_tcpretrans"] for each in results)
    say(
        part="mixed",
        passed=passed,
        segments=host.retransmitted_segments,
        kernel_segments=grown["TcpRetransSegs"],
        tcpretrans_events=sum(int(str(each["tcpretrans_events"])) for each in results),
        timeouts=host.timeouts,
        kernel_timeouts=grown["TcpExtTCPTimeouts"],
        causes=by_cause,
        kernel_causes={
            "fast": grown["TcpExtTCPFastRetrans"],
            "timeout": grown["TcpExtTCPSlowStartRetrans"] + timers,
            "syn": grown["TcpExtTCPSynRetrans"],
        },
        agree=agree,
        lost={name: count for name, count in lost.items() if count},
    )
    return passed


def serve(namespace: str, ready: Callable[[], object]) -> None:
    """Read each connection to its end, and close it."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        stack.enter_context(inside(namespace))
        for port in range(FIRST_PORT, FIRST_PORT + SERVER_PORTS):
            server = stack.enter_context(socket.create_server((kit.RECEIVER, port), backlog=1024))
            selector.register(server, selectors.EVENT_READ)
        ready()
        while True:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                far, _ = key.fileobj.accept()
                far.settimeout(1)  # a reset may be lost
                with far, contextlib.suppress(ConnectionResetError, TimeoutError):
                    while far.recv(1 << 16):
                        pass


def connect(number: int) -> None:
    """A connection of one message; no two have the same ports, so that none takes over another's row."""
    round_, local = divmod(number, LOCAL_PORTS)
    with socket.socket() as near:
        near.settimeout(20)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        near.bind(("", FIRST_LOCAL + local))
        near.connect((kit.RECEIVER, FIRST_PORT + round_))
        near.sendall(b"x" * MESSAGE_BYTES)
        if number % 2:  # ends with a reset; the others in TIME-WAIT, for a minute
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))


def short(connections: int, rows: int) -> bool:
    """The second part."""
    with Lab.up(f"prove-short-{os.getpid()}", hosts=2, rails=2, rate="1gbit", queue_bytes=40_000) as lab:
        namespace = kit.sender(lab)
        listening = multiprocessing.Event()
        process = multiprocessing.Process(target=serve, args=(kit.receiver(lab), listening.set), daemon=True)
        process.start()
        try:
            listening.wait(30)
            with kit.watching(namespace, flows=rows) as watch:
                kit.route_over(lab, 1)
                lab.lose(1, LOST_SHARE)
                before, began = kit.nstat(namespace), time.monotonic()
                for number in range(connections):
                    connect(number)
                    if number % 64 == 0:
                        watch.tick(time.monotonic_ns())
                took_s = time.monotonic() - began
                kit.until(lambda: kit.settled(namespace), "all connections are closed")
                watch.run(15)
                host, kernel = watch.host(), kit.nstat(namespace)
                present = len(watch.loaded.map("tcp_flows").read()[0])
                sent_over_paths = int(watch.loaded.map("tcp_paths").read()[1]["sent_bytes"].sum())
                lost = watch.source.drops()
        finally:
            process.terminate()
            process.join()
    grown = {name: value - before.get(name, 0) for name, value in kernel.items()}
    agree = {
        "created": host.created == grown["TcpActiveOpens"],
        "segments": host.retransmitted_segments == grown["TcpRetransSegs"],
        "timeouts": host.timeouts == grown["TcpExtTCPTimeouts"],
        "resets": host.resets_sent + host.resets_refused == grown["TcpOutRsts"],
        "bytes": host.sent_bytes == connections * MESSAGE_BYTES,
        "evicted": host.evicted == connections - present,
        "flows": host.flows == present,
        "paths": sent_over_paths == host.sent_bytes,
        "lost": not any(lost.values()),
        "again": host.retransmitted_segments >= connections * LOST_SHARE,
    }
    passed = all(agree.values())
    say(
        part="short",
        passed=passed,
        connections=connections,
        seconds=round(took_s, 1),
        rows=rows,
        created=host.created,
        kernel_created=grown["TcpActiveOpens"],
        present=present,
        evicted=host.evicted,
        sent_bytes=host.sent_bytes,
        resets_sent=host.resets_sent,
        resets_refused=host.resets_refused,
        kernel_resets=grown["TcpOutRsts"],
        segments_again=host.retransmitted_segments,
        kernel_segments_again=grown["TcpRetransSegs"],
        slowest_tick_cpu_ms=round(watch.slowest_tick_ns / 1e6, 2),
        agree=agree,
        lost={name: count for name, count in lost.items() if count},
    )
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transfers", type=int, default=20)
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    chance = random.Random(given.seed)
    parts = [mixed(given.transfers, chance)] if given.transfers else []
    parts += [short(given.connections, given.rows)] if given.connections else []
    say(verdict=all(parts), seed=given.seed)
    return 0 if all(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
