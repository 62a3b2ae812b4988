"""What the controller says of itself, as signals.

Pure but for the clocks (CLOCK_REALTIME for people only) and `tell`, which hands acts to the agent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.client import Client
from pytools.signals import Act, Path, header, nexthop_name
from pytools.units import duration_text
from steering.acting.rollback import Undone
from steering.plan import BondAct, Change, Group, Hold, Target, kind_of, title

if TYPE_CHECKING:  # a guardian needs none of their code
    from steering.acting.bond_ports import Restored
    from steering.actuators.rto_min import Chosen
    from steering.actuators.standbys import Moved
    from steering.deciding.engine import Alert
    from steering.deciding.notices import Notice
    from steering.flows.hidden_ways import WayAct
    from steering.flows.labels import LabelAct
    from steering.flows.plan import FlowAct

Outcome = Literal["dry_run", "applied", "failed", "undone"]

_WEIGHTS_MOVE: Final = "new flows, and live ones whose hash then falls to another hop"
_FLOW_MOVES: Final = {
    "pin": "these live flows only, at once",
    "unpin": "these live flows only, back to where they are routed",
    "relabel": "these live flows only, behind the nexthop",
    "unlabel": "these live flows only, behind the nexthop",
}


@dataclass(slots=True)
class Output:
    """Where what a controller says goes, and in whose name."""

    host: str  # as the agent calls this host, once that is heard
    say: Callable[[str], None]  # takes a line for the log
    send: Callable[[Act], None]  # takes each act, for whoever watches


def act_id(target: Target) -> str:
    """A new name for an act: unique on this host, and in the order of time."""
    return f"{time.time_ns():x}-{target}"


def _made(
    host: str,
    named: str,
    what: str,
    because: str,
    outcome: str,
    seen_ns: int,
    decided_ns: int | None = None,
    *,
    at_ns: int | None = None,
    name: str = "",
    failure: str = "",
    paths: Iterable[Path] = (),
    **rest: Any,
) -> Act:
    """An act; decided now unless that was earlier, under a new name unless it has one."""
    now = time.monotonic_ns() if at_ns is None else at_ns
    return Act(
        **header(host, now),
        act_id=name or act_id(named),
        what=what,
        because=f"{because}; failed: {failure}" if failure else because,
        outcome=outcome,  # type: ignore[arg-type]
        seen_ns=seen_ns,
        decided_ns=now if decided_ns is None else decided_ns,
        paths=list(dict.fromkeys(paths)),
        **({"acknowledged_ns": None} | rest),
    )


def act(
    host: str,
    group: Group,
    change: Change,
    outcome: Outcome,
    seen_ns: int,
    decided_ns: int,
    acknowledged_ns: int | None = None,
    name: str = "",
    failure: str = "",
) -> Act:
    """An act that was made, would have been, or failed."""
    return _made(
        *(host, change.target, title(change.target), change.because, outcome, seen_ns, decided_ns),
        name=name,
        failure=failure,
        target=change.target,
        actuator=kind_of(change.target),
        moves=_WEIGHTS_MOVE,
        before=group.named(change.before),
        after=group.named(change.after),
        under=change.under,
        paths=change.paths,
        acknowledged_ns=acknowledged_ns,
    )


def undone(host: str, done: Undone, why: str, decided_ns: int) -> Act:
    """An act that was taken back; `host` where the journal does not name it."""
    last = done.last
    back = Change(last.target, last.after, last.original, why, last.under)
    times = (decided_ns, decided_ns, done.acknowledged_ns)
    return act(last.host or host, last.group, back, "undone", *times, last.act_id)


def alert(host: str, said: Alert) -> Act:
    """A rule that only says something began to hold, or is over."""
    outcome = "alert" if said.holds else "alert_over"
    return _made(
        *(host, f"alert:{said.rule}", f"alert {said.rule}", said.text, outcome, said.seen_ns),
        before={},
        after={str(said.path): int(said.holds)},
        under=said.rule,
        paths=[said.path],
        actuator="alert",
        moves="nothing: it only says so",
    )


def order(host: str, what: str, why: str, begins: bool) -> Act:
    """Something that the operator ordered began to hold, or is over."""
    outcome, now = "alert" if begins else "alert_over", time.monotonic_ns()
    return _made(
        host, what, what, why, outcome, now, at_ns=now, before={}, after={}, under="operator", actuator="operator"
    )


def rerouted(host: str, moved: Moved, now: int) -> Act:
    """The kernel has begun to move packets off a path by itself: one that is dead, or whose queue became long at once.

    Which of these it is, nobody knows before the next answer.
    """
    standby, so_far = moved.standby, _packets(moved.packets)
    if moved.since_ns:
        silent = duration_text(max(moved.first_ns - moved.since_ns, 0))
        why = f"no answer for {silent} while {standby.other} answers: silent, or a longer queue"
    else:
        why = f"{_silence(moved)}; it answers again, but not for long enough yet"
    names = [nexthop_name(each.gateway, each.interface) for each in (standby.path, standby.other)]
    because = f"{standby.path}: {why}; the kernel moved {so_far} so far"
    what = f"fast reroute to {standby.path.destination}"
    return _made(
        *(host, standby.target, what, because, "applied", moved.first_ns, moved.first_ns),
        at_ns=now,
        target=standby.target,
        actuator="reroute",
        moves="every packet that is routed along this path",
        before={names[0]: 1, names[1]: 0},
        after={names[0]: 0, names[1]: 1},
        under=standby.under,
        paths=[standby.path, standby.other],
        acknowledged_ns=moved.first_ns,
    )


def reroute_over(act: Act, moved: Moved, packets: int, size_bytes: int, lasted_ns: int, now: int) -> Act:
    """The end of such a move: the path answers again, or nothing is routed along it any more."""
    lasted = f"{_packets(packets)} ({size_bytes:,} bytes) in {lasted_ns / 1e6:,.0f} ms"
    why = f": {_silence(moved)}" if moved.lasted_ns else ""
    return msgspec.structs.replace(
        act,
        at_ns=now,
        unix_ns=time.time_ns(),
        before=act.after,
        after=act.before,
        because=f"the kernel moved {lasted}; none any more{why}",
        outcome="undone",
        decided_ns=now,
        acknowledged_ns=now,
    )


def _silence(moved: Moved) -> str:
    """What the silence was, once it is over."""
    if not moved.lasted_ns:
        return "it was silent"
    if moved.was_queue:
        return f"a queue, not a dead path: an answer took {duration_text(moved.waited_ns)}"
    return f"it was silent for {duration_text(moved.lasted_ns)}"


def _packets(count: int) -> str:
    return "1 packet" if count == 1 else f"{count:,} packets"


def flow_act(
    host: str, act: FlowAct, outcome: Outcome, decided_ns: int, acknowledged_ns: int | None = None, failure: str = ""
) -> Act:
    """Something that was done to flows, would have been, or failed."""
    what = f"{act.kind} {len(act.flows)} flow{'s' if len(act.flows) > 1 else ''} of {title(act.target)}"
    return _made(
        *(host, act.target, what, act.because, outcome, act.seen_ns, decided_ns),
        failure=failure,
        target=act.target,
        actuator="pin" if act.kind in ("pin", "unpin") else "label",
        moves=_FLOW_MOVES[act.kind],
        before=dict(act.before),
        after=dict(act.after),
        under=act.under,
        paths=[*(path for path, _ in act.troubles), *(path for path in act.left if path is not None)],
        acknowledged_ns=acknowledged_ns,
    )


def port_act(host: str, act: WayAct, outcome: Outcome, decided_ns: int, acknowledged_ns: int | None = None) -> Act:
    """What new connections avoid from now on, or no more."""
    what = f"ports of new connections to {act.path.destination}"
    kind = "ports", "ports", "new IPv4 TCP connections, behind the nexthop"
    return _around_ways(host, act, what, kind, outcome, decided_ns, acknowledged_ns)


def label_act(
    host: str, act: LabelAct, outcome: Outcome, decided_ns: int, acknowledged_ns: int | None = None, failure: str = ""
) -> Act:
    """Other labels for live connections, or none of ours any more."""
    count = len(act.give or act.end)
    whose = f"{count} connection{'' if count == 1 else 's'}" if count else "live connections"
    what = f"flow labels of {whose} to {act.way.path.destination}"
    kind = "label", "labels", "these live connections only, behind the nexthop"
    return _around_ways(host, act.way, what, kind, outcome, decided_ns, acknowledged_ns, failure)


def subflow_act(
    host: str, way: WayAct, outcome: Outcome, decided_ns: int, acknowledged_ns: int, failure: str = ""
) -> Act:
    """A subflow of an MPTCP connection that another has replaced."""
    what = f"a subflow to {way.path.destination} replaced"
    kind = "subflow", "ports", "this MPTCP connection only, behind the nexthop"
    return _around_ways(host, way, what, kind, outcome, decided_ns, acknowledged_ns, failure)


def _around_ways(
    host: str,
    way: WayAct,
    what: str,
    kind: tuple[str, str, str],  # actuator, part of the policy, what it moves
    outcome: Outcome,
    decided_ns: int,
    acknowledged_ns: int | None,
    failure: str = "",
) -> Act:
    actuator, under, moves = kind
    return _made(
        *(host, way.path.address, what, way.because, outcome, way.seen_ns, decided_ns),
        failure=failure,
        target=way.path.address,
        actuator=actuator,
        moves=moves,
        before=dict(way.before),
        after=dict(way.after),
        under=under,
        paths=[way.path],
        acknowledged_ns=acknowledged_ns,
    )


def bond_act(
    host: str, act: BondAct, outcome: Outcome, decided_ns: int, acknowledged_ns: int | None = None, failure: str = ""
) -> Act:
    """Another active port of a bond."""
    before, after = act.bond.port(act.bond.active), act.bond.port(act.port)
    name, target = act.bond.name, f"bond:{act.bond.name}"
    return _made(
        *(host, target, f"active port of {name}", act.because, outcome, act.seen_ns, decided_ns),
        failure=failure,
        target=target,
        actuator="bond",
        moves="every packet to and from the bond",
        before={before: 1} if before == after else {before: 1, after: 0},
        after={after: 1} if before == after else {before: 0, after: 1},
        under=act.under,
        paths=act.paths,
        acknowledged_ns=acknowledged_ns,
    )


def bond_restored(host: str, done: Restored) -> Act:
    """The former port of a bond was put back, or is left to others, or could not be."""
    now = time.monotonic_ns()
    outcome: Outcome = "failed" if done.failure else "undone"
    return bond_act(host, done.act, outcome, done.act.seen_ns, None if done.failure else now, done.failure)


def notified(host: str, hook: str, to: str, notice: Notice, over: bool, outcome: Outcome, why: str = "") -> Act:
    """A hook was told of an occurrence, or that it is over; or could not be, or would be."""
    target, because = f"notify:{hook}", f"{notice.path}: {why or notice.because}"
    return _made(
        *(host, target, f"notify {hook}", because, outcome, notice.seen_ns),
        target=target,
        actuator="notify",
        moves="nothing: it tells others",
        before={to: int(over)},
        after={to: int(not over)},
        under=notice.rule,
        paths=[notice.path],
    )


def hold_act(host: str, hold: Hold, outcome: Outcome, because: str, decided_ns: int, failure: str = "") -> Act:
    """Packets along a path are held from now on while its queue is long, or not any more."""
    limits = {"threshold_us": hold.limits.threshold_ns // 1000, "longest_us": hold.limits.longest_ns // 1000}
    what = f"hold to {hold.path.destination} by {nexthop_name(hold.path.gateway, hold.path.interface)}"
    return _switched(
        *(host, "hold", what, because, outcome, decided_ns, failure, {}, limits),
        target=f"hold:{hold.path}",
        actuator="hold",
        moves="no packets: they wait at this host while the queue on the path is longer than the threshold",
        under=hold.under,
        paths=[hold.path],
    )


def rto_min_act(host: str, chosen: Chosen, because: str, outcome: Outcome, decided_ns: int, failure: str = "") -> Act:
    """The minimum RTO of managed routes."""
    ours, theirs = ({"rto_min_ms": each} for each in (chosen.milliseconds, chosen.before_ms))
    return _switched(
        *(host, "rto_min", "minimum RTO of managed routes", because, outcome, decided_ns, failure, theirs, ours),
        target="rto_min",
        actuator="rto_min",
        moves="no packets: TCP connections to managed destinations retransmit earlier",
        under="manage.rto_min",
    )


def _switched(
    host: str,
    name: str,
    what: str,
    because: str,
    outcome: Outcome,
    decided_ns: int,
    failure: str,
    off: dict[str, int],
    on: dict[str, int],
    **rest: Any,
) -> Act:
    """Something that is on from now on, or off again when it is undone."""
    now = time.monotonic_ns()
    before, after = (on, off) if outcome == "undone" else (off, on)
    done = now if outcome in ("applied", "undone") else None
    return _made(
        *(host, name, what, because, outcome, decided_ns, decided_ns),
        at_ns=now,
        failure=failure,
        before=before,
        after=after,
        acknowledged_ns=done,
        **rest,
    )


def tell(netns: str | None, acts: Iterable[Act]) -> None:
    """Hand acts over, if an agent runs that takes them within a second. In its network namespace or outside."""
    named = [act if act.host else msgspec.structs.replace(act, host=directories.instance(netns)) for act in acts]
    if not named:
        return
    with contextlib.suppress(SwerveError), Client(directories.agent_socket(netns), frozenset()) as agent:
        for act in named:
            agent.publish(act)
