"""`swerve status`, and `swerve` alone: how this host is, in at most ten lines. Changes nothing.

What is gathered is a mapping, printed by `-j`; the lines are made of it. Times are nanoseconds.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any, Final

import click

from pytools import directories
from pytools.cli_options import Options, common
from pytools.errors import SwerveError
from pytools.signals import AnySignal, Clock, PathDelay, PathState
from pytools.units import duration
from steering.commands import status as steering

_LISTEN_S: Final = 1.3  # a long window, and a controller's round of all states, take a second
_WORST: Final = 3  # paths shown, unless other lines take their room
_LINES: Final = 10
_OTHERS: Final = 5  # lines that there always are
_TYPES: Final = frozenset({"path_delay", "path_state", "clock"})
_GOOD: Final = ("healthy", "answered")


@click.command(epilog="Example: swerve status -n swerve-x-h1")
@common(follows=False)
def status(options: Options) -> None:
    """Show the state of this host in a few lines: agent, paths, clocks, steering.

    `swerve` alone does the same. See `swerve delay` for every path, `swerve steer status` for what is in force.
    """
    facts = gather(options.netns)
    if options.json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    for line in lines(facts, directories.option_of(facts["instance"])):
        click.echo(line)


def gather(netns: str | None) -> dict[str, Any]:
    """What the agent says within a moment, and what is known of the controller."""
    from pytools.ipc.client import Client

    facts: dict[str, Any] = {"instance": directories.instance(netns), "version": version("swerve"), "agent": None}
    try:
        with Client(directories.agent_socket(netns), _TYPES) as agent:
            facts["agent"] = summary(agent.within(_LISTEN_S))
    except SwerveError as error:
        facts["why"] = str(error)
    try:
        facts["steering"] = steering.facts_of(netns, with_paths=False)
    except SwerveError as error:
        facts["steering"], facts["steering_unknown"] = None, str(error)
    return facts


def summary(signals: Iterable[AnySignal]) -> dict[str, Any]:
    """What these signals say in all, the latest of each path and clock.

    A path is as its controller calls it; where none does, whether it is answered.
    """
    delays: dict[str, PathDelay] = {}
    states: dict[str, PathState] = {}
    clocks: dict[str, Clock] = {}
    for signal in signals:
        if isinstance(signal, PathDelay):
            before = delays.get(str(signal.path))
            if before is None or signal.window_ns >= before.window_ns:
                delays[str(signal.path)] = signal
        elif isinstance(signal, PathState):
            states[str(signal.path)] = signal
        elif isinstance(signal, Clock):
            clocks[signal.of] = signal
    named = {path: states[path].state if path in states else _answered(delay) for path, delay in delays.items()}
    bounds = [clock.bound_ns for clock in clocks.values() if clock.bound_ns is not None]
    return {
        "host": next((delay.host for delay in delays.values()), None),
        "paths": len(delays),
        "peers": len({delay.path.destination for delay in delays.values()}),
        "states": dict(collections.Counter(named.values())),
        "worst": [_about(delays[path], states.get(path), named[path]) for path in _worst(delays, named)],
        "clocks": dict(collections.Counter(clock.state for clock in clocks.values())),
        "clock_bound_ns": max(bounds, default=None),
    }


def _answered(delay: PathDelay) -> str:
    return "answered" if delay.received else "not answered"


def _queueing_ns(delay: PathDelay) -> int:
    return max(delay.forward.queueing_p99_ns or 0, delay.overtaken_forward_p50_ns or 0)


def _worst(delays: dict[str, PathDelay], named: dict[str, str]) -> list[str]:
    """The paths to look at first: those that are not well, else the one on which packets wait longest."""
    order = sorted(delays, key=lambda path: (-delays[path].loss, -_queueing_ns(delays[path])))
    bad = [path for path in order if named[path] not in _GOOD]
    return (bad or [path for path in order if delays[path].lost or _queueing_ns(delays[path])][:1])[:_WORST]


def _about(delay: PathDelay, state: PathState | None, named: str) -> dict[str, Any]:
    path = delay.path
    return {
        "path": f"{path.source}>{path.destination} dev {path.interface}",
        "state": named,
        "why": state.reason if state is not None and named not in _GOOD else "",
        "queueing_p99_ns": _queueing_ns(delay) if delay.received or delay.overtaken_forward_p50_ns else None,
        "loss": round(delay.loss, 4),
    }


def lines(facts: dict[str, Any], option: str) -> Iterator[str]:
    """What a person reads, at most ten lines."""
    agent, steered = facts["agent"], [*_steering(facts)]
    yield f"swerve {facts['version']}, instance {facts['instance']}" + (
        f", host {agent['host']}" if agent and agent["host"] else ""
    )
    if agent is None:
        yield f"agent     {facts['why']}"
    elif not agent["paths"]:
        yield "agent     running, but no path is probed: its configuration names no peer that has a route"
    else:
        yield f"agent     running: {_count(agent['paths'], 'path')} to {_count(agent['peers'], 'host')}"
        yield f"paths     {_counted(agent['states'])}"
        for each in agent["worst"][: _LINES - _OTHERS - len(steered)]:
            waits = "" if each["queueing_p99_ns"] is None else f", queueing p99 {duration(each['queueing_p99_ns'])}"
            why = f" ({each['why']})" if each["why"] else ""
            yield f"  {each['path']}: {each['state']}{waits}, {each['loss']:.1%} lost{why}"
        bound = agent["clock_bound_ns"]
        within = "" if bound is None else f", within ±{duration(bound)}"
        yield f"clocks    {_counted(agent['clocks']) or 'one for all hosts, or not compared yet'}{within}"
    yield from steered
    if agent is None:
        yield f"next      swerve doctor{option}: what this host can do, and what is missing"
    else:
        yield f"next      swerve top{option}: a live view; swerve steer status{option}: what is in force, and why"


def _steering(facts: dict[str, Any]) -> Iterator[str]:
    known = facts["steering"]
    if known is None:
        yield f"steering  {facts['steering_unknown']}"
        return
    first, *_ = steering.about_the_controller(known)
    yield f"steering  {first}"
    if known["frozen"]:
        yield f"          FROZEN, nothing is changed: {known['frozen']}"
    targets = known["in_force"]
    if targets or known["running"]:
        others = ((len(known["orders"]), "order"), (known.get("pin_count", 0), "pin"))
        counted = [_count(len(targets), "target"), *(_count(count, name) for count, name in others if count)]
        yield f"in force  {', '.join(counted)}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def _counted(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items(), key=lambda each: -each[1]))
