"""What tcp.c costs a packet: nanoseconds of BPF run time, net of an empty program on the same packets.

The TCP window is kept small enough that nothing is lost but where it shall be. `tcp` and `udp`: an unshaped veth pair;
what an ordinary packet pays. `lossy`: the mean over all packets, retransmissions included, on a rail whose queue is far
too short. `after_loss`: the same connection, once the rail is mended.
"""

from __future__ import annotations

import functools
import os
import time

from _common import DEVICE, Hook, emit, iperf3_server, median, note, run_times, veth_pair, whole

from pytools.kernel.loader import Loaded, load
from pytools.lab import Lab, namespaces
from pytools.sources.programs import TCP_ENTRY, retransmissions

ROUNDS = 7
# With round trips of microseconds a busy processor is enough to have them sent: retransmissions where nothing is lost.
NO_TAIL_LOSS_PROBES = {"ipv4/tcp_early_retrans": 0}


def main() -> None:
    with whole(load([retransmissions()])) as loaded:
        lossless(loaded)
        lossy(loaded)


def lossless(loaded: Loaded) -> None:
    with veth_pair() as pair, pair.iperf3_server():
        namespaces.set_sysctls(pair.ends[0], NO_TAIL_LOSS_PROBES)
        hooks = {TCP_ENTRY: Hook(loaded.programs[TCP_ENTRY], pair.ends[0], DEVICE, "egress")}
        for case, options in (
            ("tcp", ("-w", "128K")),
            ("udp", ("-u", "-b", "0", "-l", "1400")),
        ):
            before = retransmitted(loaded)
            work = functools.partial(pair.iperf3, "-t", "1", *options)
            figures = run_times(hooks, work, ROUNDS)[TCP_ENTRY]
            note(f"{case}: {retransmitted(loaded) - before} segments retransmitted")
            emit("tcp", "run_time", median(figures), "ns/hit", "lower", case=case, n=ROUNDS)


def lossy(loaded: Loaded) -> None:
    with Lab.up(f"bench-tcp-{os.getpid()}", hosts=2, rails=1, rate="none") as lab:
        sender, receiver = lab.hosts
        namespaces.set_sysctls(sender.netns, NO_TAIL_LOSS_PROBES)
        hooks = {TCP_ENTRY: Hook(loaded.programs[TCP_ENTRY], sender.netns, sender.interfaces[0].name, "egress")}
        with iperf3_server(functools.partial(lab.start, receiver)):
            lab.congest(1, "1gbit", queue_bytes=20_000)
            before = retransmitted(loaded)
            flow = lab.start(sender, ["iperf3", "-c", receiver.service, "-t", "300", "-w", "128K"])
            figures = run_times(hooks, lambda: time.sleep(1), ROUNDS)[TCP_ENTRY]
            note(f"lossy: {retransmitted(loaded) - before} segments retransmitted")
            emit("tcp", "run_time", median(figures), "ns/hit", "lower", case="lossy", n=ROUNDS)

            lab.heal()
            before = retransmitted(loaded)
            figures = run_times(hooks, lambda: time.sleep(1), ROUNDS)[TCP_ENTRY]
            note(f"after_loss: {retransmitted(loaded) - before} segments retransmitted")
            emit("tcp", "run_time", median(figures), "ns/hit", "lower", case="after_loss", n=ROUNDS)
            flow.kill()


def retransmitted(loaded: Loaded) -> int:
    return int(loaded.map("tcp_counters").read_percpu_sum()[0])


if __name__ == "__main__":
    main()
