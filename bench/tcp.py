"""What tcp.c costs a packet: nanoseconds of BPF run time, net of an empty program on the same packets."""

from __future__ import annotations

from _common import Hook, emit, iperf3, iperf3_server, median, run_times, veth_pair, whole

from pytools.kernel.loader import load
from pytools.sources.tcp import ENTRY, program

ROUNDS = 7


def main() -> None:
    with whole(load([program()])) as loaded, veth_pair() as pair, iperf3_server(pair):
        hook = {ENTRY: Hook(loaded.programs[ENTRY], 0, "egress")}

        def measure(case: str, *options: str) -> None:
            figures = run_times(pair, hook, lambda: iperf3(pair, "-t", "1", *options), ROUNDS)[ENTRY]
            emit("tcp", "run_time", median(figures), "ns/hit", "lower", case=case, n=ROUNDS)

        measure("tcp")
        measure("udp", "-u", "-b", "0", "-l", "1400")


if __name__ == "__main__":
    main()
