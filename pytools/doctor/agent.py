"""What `doctor` finds around the agent: what the one that runs may do and says, its configuration, who else is at TC.

Run in the network namespace that is examined.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from pytools import config as configuration
from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.client import Client
from pytools.ipc.socket_files import connect, peer
from pytools.ipc.wire import TAGS
from pytools.kernel import privileges
from pytools.kernel.bpf import tc_programs
from pytools.kernel.features import Finding
from pytools.kernel.netlink.nexthops import family_of
from pytools.kernel.netlink.routing import Netlink, NetlinkError
from pytools.kernel.own_addresses import with_own_routes
from pytools.signals import AnySignal, PathLiveness, RdmaSight, Self

_MOST: Final = 16  # named; the rest is counted
_ASKED_S: Final = 2.5  # an agent says once a second what it counts and sees
_HUNG_NS: Final = 5_000_000_000
_WITHOUT_OUR_KEY: Final = {
    "probe_unsigned_request": "probes of a peer that has no key",
    "probe_unsigned_reply": "replies of a peer that has no key, or does not run swerve",
    "probe_forged_request": "probes of a peer with another key, or forged",
}
_Told = TypeVar("_Told", bound=AnySignal)


def by_agent(name: str | None, kind: type[_Told], judge: Callable[[Iterator[_Told]], Finding]) -> Finding:
    """What is found in what the agent that runs says of this kind within a few seconds."""
    try:
        with Client(directories.agent_socket(name), frozenset({TAGS[kind]})) as client:
            return judge(signal for signal in client.within(_ASKED_S) if isinstance(signal, kind))
    except (SwerveError, OSError):
        return Finding(None, "no agent runs that could say")


def served(name: str | None) -> str:
    """The socket on which an agent answers.

    Raises
    ------
    SwerveError
        If none does.
    """
    with Client(directories.agent_socket(name), frozenset()):
        return str(directories.agent_socket(name))


def configured(name: str | None, config: Path | None) -> str:
    place = config or directories.default_config(name)
    loaded, hints = configuration.read(place)
    return "; ".join([f"{place}: host {loaded.host}, {len(loaded.peers)} peers", *hints])


def _agent(name: str | None) -> tuple[int, int] | None:
    """Process and user of the agent that runs, by the other end of its socket."""
    try:
        with connect(directories.agent_socket(name)) as sock:
            pid, uid, _ = peer(sock)
    except (SwerveError, OSError):
        return None
    return pid, uid


def privileges_of(name: str | None) -> tuple[Finding, list[privileges.Lost]]:
    agent = _agent(name)
    if agent is None:
        return Finding(None, "no agent runs"), []
    pid, uid = agent
    mask = privileges.effective(pid)
    if mask is None:
        return Finding(None, f"process {pid} cannot be seen from here"), []
    lost = privileges.lost(mask)
    whose = f"process {pid} of user {uid}"
    return Finding(not lost, f"{whose}, without {', '.join(each.capability for each in lost)}" if lost else whose), lost


def priority(name: str | None) -> Finding:
    agent = _agent(name)
    if agent is None:
        return Finding(None, "no agent runs")
    nice = privileges.priority_of(agent[0])
    if nice is None:
        return Finding(None, f"process {agent[0]} cannot be seen from here")
    real_time = privileges.pacer_priority(agent[0])
    sends = f"real-time priority {real_time}" if real_time else "no real-time priority"
    return Finding(nice <= privileges.NICE, f"process {agent[0]} at nice {nice}; its probes are sent at {sends}")


def peers(told: Iterable[PathLiveness]) -> Finding:
    """Whether the agents of the peers work, by what their kernels say of them in their answers."""
    found = {each.path.destination: each.peer_agent_age_ns for each in told if each.peer_agent_age_ns is not None}
    hung = [f"{peer}: not for {age_ns / 1e9:.0f} s" for peer, age_ns in sorted(found.items()) if age_ns > _HUNG_NS]
    more = f" and {len(hung) - _MOST} more" if len(hung) > _MOST else ""
    return Finding(not hung, "; ".join(hung[:_MOST]) + more)


def keys(told: Iterator[Self]) -> Finding:
    """Whether this host and its peers share the cluster key, by what its agent has counted since it started."""
    own = next(told, None)
    if own is None:
        return Finding(None, "the agent has not said what it counted")
    dropped = own.drops
    found = [f"{dropped[counter]:,} {what}" for counter, what in _WITHOUT_OUR_KEY.items() if dropped.get(counter)]
    return Finding(not found, "; ".join(found))


def others_at_tc(name: str | None, config: Path | None) -> Finding:
    wanted, why = _interfaces(name, config)
    found = [each for interface, index in wanted for each in tc_programs.on(interface, index) if not each.ours]
    known = [each for each in found if each.ours is not None]
    named = known or found
    said = [str(each) for each in named[:_MOST]]
    if len(named) > _MOST:
        said.append(f"and {len(named) - _MOST} more")
    if found and not known:
        return Finding(None, f"names need CAP_SYS_ADMIN, and these may be ours: {'; '.join(said)}")
    return Finding(not found, "; ".join(said) or f"on {why}")


def _interfaces(name: str | None, config: Path | None) -> tuple[list[tuple[str, int]], str]:
    """The interfaces that carry paths to the configured peers; every one where that is not known."""
    all_of_them = {index: interface for index, interface in socket.if_nameindex() if interface != "lo"}
    try:
        peers = configuration.load(config or directories.default_config(name)).peers
        with Netlink() as netlink:
            indexes = set(_carrying(netlink, [each.address for each in peers]))
    except SwerveError:
        indexes = set()
    carrying = [(all_of_them[each], each) for each in sorted(indexes & all_of_them.keys())]
    if carrying:
        return carrying, ", ".join(interface for interface, _ in carrying)
    return [(interface, index) for index, interface in sorted(all_of_them.items())], "any interface"


def _carrying(netlink: Netlink, addresses: Sequence[str]) -> Iterator[int]:
    """Indexes of the interfaces by which these addresses may be reached, whatever the weights."""
    nexthops = {each.id: each.ifindex for each in netlink.nexthops()}
    members = {group.id: tuple(group.weights) for group in netlink.groups()}
    ours = netlink.addresses()
    own = {family: with_own_routes(family, netlink.rules(family), ours) for family in set(map(family_of, addresses))}
    for address, source in [(each, source) for each in addresses for source in (None, *own[family_of(each)])]:
        try:
            route = netlink.route_get(address, matched=True, source=source)
        except NetlinkError:
            continue
        objects = () if route.nexthop_id is None else members.get(route.nexthop_id, (route.nexthop_id,))
        for index in (route.ifindex, *(hop.ifindex for hop in route.hops or ()), *(nexthops.get(o) for o in objects)):
            if index:
                yield index


def rdma_seen(told: Iterator[RdmaSight]) -> Finding:
    """How the agent that runs sees each process."""
    sight = next(told, None)
    if sight is None:
        return Finding(None, "the agent says nothing of RDMA")
    if not sight.available:
        return Finding(False, sight.reason)
    seen = "; ".join(f"{process}: {how}" for process, how in sorted(sight.seen.items()))
    return Finding(True, seen or "no process uses it now")
