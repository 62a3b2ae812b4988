"""The smallest controller of flows: agent in, pins out, no weights. Runs in the namespace of one lab host.

Started as `python _elephants_loop.py NETNS POLICY`; writes "ready", then one JSON object an act to standard output.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path

import msgspec

from pytools import directories
from pytools.ipc.bus import Client
from pytools.kernel.netlink.routing import Netlink
from pytools.signals import Act
from steering.acting.flows import FlowActing
from steering.acting.messages import Output
from steering.actuators.overlay import Overlay
from steering.deciding.engine import Engine
from steering.flows.engine import SIGNALS, FlowEngine
from steering.policy.file import load as load_policy

_TICK_S = 0.02
_REFRESH_NS = 1_000_000_000


def main(netns: str, policy_file: str) -> None:
    policy = load_policy(Path(policy_file))
    engine, flows = Engine(policy), FlowEngine(policy, netns)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))

    def send(act: Act) -> None:
        print(msgspec.json.encode(act).decode(), flush=True)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with (
        FlowActing(flows, engine, Output("h1", say, send)) as acting,
        Netlink() as netlink,
        Client(directories.agent_socket(netns), SIGNALS) as agent,
        contextlib.ExitStack() as stack,
    ):
        acting.open()
        overlay, refresh_ns, ready = stack.enter_context(Overlay(netlink, policy.manage, False)), 0, False
        while not stopped:
            now = time.monotonic_ns()
            if now >= refresh_ns:
                refresh_ns = now + _REFRESH_NS
                found = overlay.refresh()
                engine.arrange(found.groups.values(), found.targets_of, now)
                if not ready:
                    ready = True
                    print("ready", flush=True)
            first = agent.next(_TICK_S)
            now = time.monotonic_ns()
            for each in ([first] if first is not None else []) + agent.read():
                engine.take(each, now)
                flows.take(each, now)
            engine.changes(now)
            acting.turn(now)


if __name__ == "__main__":
    main(*sys.argv[1:])
