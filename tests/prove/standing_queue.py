"""Proof: a queue that stands for minutes is left once and not returned onto; once it is gone, the path is back in time.

    python tests/prove/standing_queue.py [--seconds 600] [--base 30] [--case CASE]...

Two hosts, two rails, an agent and a controller on each, as shipped but for the time that minima reach back (`--base`).
What fills rail 1 is not the controllers' to move: it goes to the hosts' addresses on that rail.

- flows: four long-lived TCP flows from h1 to h2 that keep 15 to 20 ms waiting in a deep buffer, with no loss: each has
  the same number of bytes on the way all the time
- constant: a constant rate of UDP towards h2, above what the port takes
- both: the same towards both hosts: the queues of both directions are equal

Prints a JSON line for each case, then the verdict. A case holds if each host whose way out is congested leaves rail 1
once, takes it back not even in part while the queue stands, and has its whole weight back within the dwell and the
steps after the load has ended; and if half of what h1 is told of the queue all the time is at least TOLD_NS. Run as
root, from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(Path(__file__).resolve().parent)]

from _steered_lab import Steered, steered  # noqa: E402

from pytools.errors import SwerveError  # noqa: E402
from pytools.kernel.netns import inside  # noqa: E402
from pytools.signals import Act, PathDelay  # noqa: E402
from pytools.signals import Path as NetworkPath  # noqa: E402
from steering.demo.observe import Observer  # noqa: E402

MS: Final = 1_000_000
SECOND: Final = 1_000 * MS
RAIL: Final = 1
RATE: Final = "20mbit"
DEEP_BYTES: Final = 4 << 20
FULL_BYTES: Final = 44_000  # 17 ms at this rate
LOAD: Final = "24mbit"
TOLD_NS: Final = 12 * MS  # of some 17
FLOWS, FLIGHT_BYTES = 4, 10_600  # of each on the way: together 17 ms
SIOCOUTQ: Final = 0x5411
SEGMENT_BYTES: Final = 1448
PORT: Final = 9999
CASES: Final = ("flows", "constant", "both")
DWELL_S, STEP_S, STEPS = 20, 3, 3
ONSET_S: Final = 20.0
# Besides dwell and steps: what stood must have gone, `clear_below` be seen, and each act be carried out.
LATE_S: Final = 3.0
POLICY: Final = f"""\
version: 1
manage: {{destinations: [10.9.0.0/16]}}
safety: {{lease: 3s, max_drained_share: 0.5, stale_after: 2s, baseline_after: 10s}}
rules:
  - name: congestion
    when: {{signal: queueing_delay, quantile: p50, above: 5ms, samples: 3, clear_below: 1ms}}
    then: {{shift: {{share: 0}}}}
    return: {{dwell: {DWELL_S}s, steps: [0.1, 0.5, 1.0], step: {STEP_S}s}}
"""


def serve(server: socket.socket) -> None:
    """Read what comes by all connections."""

    def read(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass

    with contextlib.suppress(OSError):
        while True:
            sock, _ = server.accept()
            threading.Thread(target=read, args=(sock,), daemon=True).start()


def send(socks: list[socket.socket], stop: threading.Event) -> None:
    """Keep so many bytes unacknowledged on each connection."""
    data = bytes(FLIGHT_BYTES)
    with contextlib.suppress(OSError):
        while not stop.wait(0.0005):
            for sock in socks:
                unacknowledged = int.from_bytes(fcntl.ioctl(sock, SIOCOUTQ, bytes(4)), sys.byteorder)
                if FLIGHT_BYTES - unacknowledged >= SEGMENT_BYTES:
                    sock.send(data[unacknowledged:])


@contextlib.contextmanager
def flows(made: Steered) -> Iterator[None]:
    """Long-lived flows from h1 to h2 that keep a queue standing."""
    source, sink = made.lab.hosts
    ends = source.interfaces[RAIL - 1].address, sink.interfaces[RAIL - 1].address
    made.lab.congest(RAIL, RATE, DEEP_BYTES, toward=sink.number)
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        with inside(sink.netns):
            server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((ends[1], PORT))
        server.listen()
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        socks = []
        for _ in range(FLOWS):
            with inside(source.netns):
                socks.append(stack.enter_context(socket.socket()))
            socks[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socks[-1].bind((ends[0], 0))
            socks[-1].connect((ends[1], PORT))
        threading.Thread(target=send, args=(socks, stop), daemon=True).start()
        stack.callback(server.shutdown, socket.SHUT_RDWR)
        stack.callback(stop.set)
        yield


@contextlib.contextmanager
def constant(made: Steered, toward: int | None) -> Iterator[None]:
    made.lab.congest(RAIL, RATE, FULL_BYTES, toward)
    made.lab.load(RAIL, LOAD, toward)
    yield


def loaded(made: Steered, case: str) -> contextlib.AbstractContextManager[None]:
    return flows(made) if case == "flows" else constant(made, 2 if case == "constant" else None)


def share(act: Act) -> float:
    """What rail 1 has of its part after an act."""
    of_rail_1 = next((weight for name, weight in act.after.items() if name.endswith(f"rail{RAIL}")), 0)
    return of_rail_1 / max(act.after.values(), default=1)


def run(made: Steered, case: str, seconds: float) -> dict[str, Any]:
    """One case: a load that lasts, and what the controllers did about it."""
    observer = Observer(made.lab.hosts)
    hosts = ["h1", "h2"] if case == "both" else ["h1"]
    try:
        began_ns = time.monotonic_ns()
        with loaded(made, case):
            gone = observer.wait_for(
                lambda record: {act.host for act in record.acts if act.outcome == "applied"} >= set(hosts), ONSET_S
            )
            if not gone:
                raise SwerveError(f"{case}: rail {RAIL} was not left within {ONSET_S:g} s")
            queue: list[int] = []
            acts: list[Act] = []
            end_ns = began_ns + int(seconds * SECOND)
            while (left_ns := end_ns - time.monotonic_ns()) > 0:
                time.sleep(min(5.0, left_ns / SECOND))
                heard = observer.take()
                acts += heard.acts
                queue += of_rail(heard.delays, began_ns + 2 * SECOND)
        made.lab.heal()
        ended_ns = time.monotonic_ns()
        limit_s = DWELL_S + STEPS * STEP_S + LATE_S
        back = observer.wait_for(lambda _: made.healthy(), limit_s + 60)
        back_s = (time.monotonic_ns() - ended_ns) / SECOND
        after = observer.take().acts
    finally:
        observer.close()
    applied = [act for act in acts if act.outcome == "applied"]
    left = [act for act in applied if act.host in hosts]
    returned = [act for act in left if share(act) > 0]
    others = [act for act in applied if act.host not in hosts and share(act) == 0]
    line = {
        "proof": "standing_queue",
        "case": case,
        "seconds": round((ended_ns - began_ns) / SECOND, 1),
        "queue_ms_p50": round(statistics.median(queue) / MS, 2) if queue else None,
        "queue_ms_min": round(min(queue) / MS, 2) if queue else None,
        "queue_ms_max": round(max(queue) / MS, 2) if queue else None,
        "left": len(left) - len(returned),
        "returned": len(returned),
        "left_by_the_other": len(others),  # for probes that came back late: their own way out is empty
        "back_s": round(back_s, 2) if back else None,
        "limit_s": limit_s,
        "acts_after": len([act for act in after if act.outcome == "applied"]),
        "others_because": [f"{act.host}: {act.because}" for act in others],
    }
    line["proven"] = (
        line["left"] == len(hosts)
        and not returned
        and len(others) <= 1
        and back
        and back_s <= limit_s
        and bool(queue)
        and statistics.median(queue) >= TOLD_NS
    )
    return line


def of_rail(delays: list[PathDelay], since_ns: int) -> list[int]:
    """Queueing towards h2 over rail 1, as h1 is told of it."""
    return [
        each.forward.queueing_p50_ns
        for each in delays
        if each.at_ns > since_ns and mine(each.path) and each.forward.queueing_p50_ns is not None
    ]


def mine(path: NetworkPath) -> bool:
    return (path.source, path.interface) == ("h1", f"rail{RAIL}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="for which the queue stands")
    parser.add_argument("--base", type=float, default=None, help="windows.base_s; as shipped unless given")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one")
    asked = parser.parse_args()
    lines = []
    for case in asked.case or CASES:
        with steered(f"standing-{os.getpid()}", POLICY, base_s=asked.base) as made:
            lines.append(run(made, case, asked.seconds))
        print(json.dumps(lines[-1]), flush=True)
    proven = all(line["proven"] for line in lines)
    print(json.dumps({"proof": "standing_queue", "proven": proven, "cases": len(lines)}), flush=True)
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
