"""Signals made up for tests of conditions, one builder per kind, all of host h1. Times are CLOCK_MONOTONIC in ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import samples
from support import mentions

from pytools.signals import (
    Link,
    LinkEvent,
    Path,
    PathEcn,
    PathLiveness,
    PathMtu,
    RdmaPort,
    RdmaQueuePair,
    Retransmissions,
    TcpPath,
)
from pytools.yaml_reader import Problem
from steering.policy.conditions import Condition
from steering.policy.file import InvalidPolicyError, parse

MS = 1_000_000
SECOND = 1_000 * MS
T0 = 1_000 * SECOND

HEAD = "version: 1\nmanage: {destinations: [10.9.0.0/16]}\nrules:\n"


def rule(when: str, then: str = "{drain: {}}", more: str = "") -> str:
    """A whole policy with one rule."""
    head = HEAD.replace("10.9.0.0/16", '10.9.0.0/16, "fd00:9::/64"') if "relabel" in then else HEAD
    return f"{head}  - name: r\n    when: {when}\n    then: {then}\n{more}"


def faults(text: str) -> tuple[Problem, ...]:
    """What is wrong with a policy, by lines."""
    with pytest.raises(InvalidPolicyError) as caught:
        parse(text)
    return caught.value.problems


def only_fault(text: str, line: int, where: str, facts: Sequence[str], hint: str = "") -> None:
    """Assert that this alone is wrong with a policy: on that line, under that key; what it names; its proposal."""
    (found,) = faults(text)
    assert (found.line, found.where, found.hint) == (line, where, hint)
    assert mentions(found.what, *facts), found.what


def condition(when: str) -> Condition:
    """The condition in a text of YAML's flow style."""
    found = parse(rule(when)).rules[0].when
    assert found is not None
    return found


def _common(path: Path, at_ns: int) -> dict[str, Any]:
    return {"host": path.source, "at_ns": at_ns, "unix_ns": at_ns}


def liveness(path: Path, at_ns: int, missed: int = 0, **fields: Any) -> PathLiveness:
    """How a path's probes are answered; silent since as many intervals as are missed."""
    interval_ns = fields.pop("interval_ns", 10 * MS)
    silent_ns = fields.pop("silent_ns", missed * interval_ns)
    last = at_ns - silent_ns if missed else at_ns
    return PathLiveness(
        **_common(path, at_ns),
        path=path,
        missed=missed,
        answered_run=fields.pop("answered_run", 0 if missed else 100),
        silent_ns=silent_ns,
        last_answer_ns=fields.pop("last_answer_ns", last),
        last_request_ns=fields.pop("last_request_ns", None),
        interval_ns=interval_ns,
        **fields,
    )


def tcp(
    path: Path, at_ns: int, segments: int, again: int = 0, delivered: int = 0, marked: int = 0, **causes: int
) -> TcpPath:
    """What TCP went through on a path in the last second."""
    return samples.tcp_path(
        **_common(path, at_ns),
        interface=path.interface,
        path=path,
        retransmitted=Retransmissions(**causes),
        retransmitted_segments=again,
        segments_out=segments,
        delivered_segments=delivered,
        delivered_ce_segments=marked,
    )


def ecn(path: Path, at_ns: int, packets: int, marked: int) -> PathEcn:
    """What came back marked in the last second."""
    return samples.path_ecn(**_common(path, at_ns), path=path, packets=packets, ce_packets=marked)


def link(path: Path, at_ns: int, carrier: bool = True, failed: tuple[str, ...] = ()) -> Link:
    """A report of a path's interface."""
    fields = {"interface": path.interface, "paths": [path], "failed_neighbours": [*failed]}
    return samples.link(**_common(path, at_ns), carrier=carrier, **fields)


def event(path: Path, at_ns: int, what: Any, paths: list[Path] | None = None) -> LinkEvent:
    """Something happened to a path's interface."""
    fields = {"paths": [path] if paths is None else paths, "happened_ns": at_ns, "detail": f"{path.interface}: {what}"}
    return samples.link_event(**_common(path, at_ns), interface=path.interface, what=what, **fields)


def mtu(path: Path, at_ns: int, state: Any) -> PathMtu:
    """Whether packets of full size pass."""
    return samples.path_mtu(**_common(path, at_ns), path=path, state=state)


def port(path: Path, at_ns: int, state: str) -> RdmaPort:
    """A report of the RDMA port over a path's interface."""
    return samples.rdma_port(**_common(path, at_ns), interface=path.interface, state=state)


def queue_pair(
    path: Path | None, at_ns: int, number: int, verdict: Any, closed: bool = False, uid: int | None = 0
) -> RdmaQueuePair:
    """A queue pair over a path."""
    return samples.rdma_qp(number, at_ns, verdict, path=path, closed=closed, uid=uid, since_ns=at_ns)
