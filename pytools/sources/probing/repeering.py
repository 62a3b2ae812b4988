"""A mesh goes on with other peers: what is measured of those that stay is not touched, not a probe of theirs is lost.

A path that goes keeps its index to itself for good, so that nothing of it can be taken for another's. Runs in the
mesh's thread, between two of its ticks; `now_ns` is CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pytools.config import AgentConfig, Peer
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.kernel.netlink import Family
from pytools.sources.probing import reflector as reflecting
from pytools.sources.probing import sender as sending
from pytools.sources.probing import stamp_packet as wire
from pytools.sources.probing import udp
from pytools.sources.probing.mesh import ProbeMesh
from pytools.sources.probing.paths import PinnedPaths
from pytools.sources.probing.reflector import Reflector
from pytools.sources.probing.sender import Sender


def why_not(before: AgentConfig, after: Sequence[Peer]) -> str:
    """Why a running mesh cannot take these peers; empty when it can."""
    had, has = (any(peer.clock != "shared" for peer in peers) for peers in (before.peers, after))
    if has and not had:
        return "the first peer with a clock of its own: clocks are not compared yet"
    if before.bus.key_file:
        return "the bus between hosts is opened for the peers that it began with"
    return ""


def set_peers(mesh: ProbeMesh, config: AgentConfig, now_ns: int) -> None:
    """Probe these peers from now on, and answer them alone.

    Raises
    ------
    SwerveError
        If the first peer of an address family needs a socket that cannot be had; then nothing has changed.
    """
    families: list[Family] = sorted({6 if ":" in peer.address else 4 for peer in config.peers})
    _open(mesh.reflector, mesh.sender, config, families)
    _leave(mesh.paths, config.peers)
    _answer(mesh.reflector, config.peers)
    _stamp(mesh, mesh._config.peers, config.peers)
    mesh._config = config
    mesh._discover(now_ns)
    current = mesh.paths.current  # a peer that only went is no news to a discovery
    for part in (mesh._measurements, mesh.sender, mesh.reflector):
        part.set_paths(current)
    mesh._path_by_end = {end: path for end, path in mesh._path_by_end.items() if path in {p.path for p in current}}


def _open(reflector: Reflector, sender: Sender, config: AgentConfig, families: Iterable[Family]) -> None:
    """Sockets of a family that had no peer."""
    probe = config.probe
    for family in families:
        if family not in reflector._sockets:
            reflector._sockets[family] = udp.open_socket(family, probe.port, probe.dscp)
            reflector._requests[family] = udp.Datagrams(family, reflecting._BATCH, reflecting._ROOM)
            reflector._packets[family] = wire.replies(reflector._requests[family].payload)
        for flow in range(probe.flows):
            if (family, flow) not in sender._sockets:
                sender._sockets[family, flow] = udp.open_socket(family, 0, probe.dscp)
                sender._arrivals[family, flow] = udp.Datagrams(family, sending._BATCH, sending._REPLY_ROOM)


def _leave(paths: PinnedPaths, peers: Sequence[Peer]) -> None:
    """Take out the paths to peers that went."""
    ends = {(peer.name, peer.address) for peer in peers}
    kept = []
    for pinned in paths.current:
        if (pinned.path.destination, pinned.path.address) in ends:
            kept.append(pinned)
        else:
            paths._remove(pinned)
    paths.current = tuple(kept)
    for path in [path for path in paths._index if (path.destination, path.address) not in ends]:
        paths._taken.add(paths._index.pop(path))
        paths._spoken_ns.pop(path, None)
    addresses = {peer.address for peer in peers}
    paths.unreachable = {address: why for address, why in paths.unreachable.items() if address in addresses}
    paths._peers, paths._ends = peers, ends


def _answer(reflector: Reflector, peers: Sequence[Peer]) -> None:
    """Answer these; a peer that stays keeps its place, and with it its sessions."""
    keys = {udp.mapped(peer.address).tobytes(): peer for peer in peers}
    for key in reflector._peers.keys() - keys.keys():
        del reflector._peers[key]
    for session in [session for session in reflector._rows if session[4:20] not in keys]:
        reflector._free.append(reflector._rows.pop(session))
    for key, peer in keys.items():
        place = reflector._peers.setdefault(key, len(reflector._tokens))
        if place == len(reflector._tokens):
            reflector._tokens = np.append(reflector._tokens, reflecting._BURST)
            for name in ("_precise_error", "_imprecise_error"):
                setattr(reflector, name, np.append(getattr(reflector, name), 0))
        shared = peer.clock == "shared"
        reflector._precise_error[place] = wire.error_estimate(STAMP_BOUND_NS, shared)
        reflector._imprecise_error[place] = wire.error_estimate(reflecting._IMPRECISE_NS, shared)


def _stamp(mesh: ProbeMesh, before: Sequence[Peer], after: Sequence[Peer]) -> None:
    """Have the kernel stamp what goes to these and comes from them."""
    if not mesh._loaded.has_map("stamp_peers"):
        return
    stamped = mesh._loaded.map("stamp_peers")
    old, new = ({peer.address for peer in peers} for peers in (before, after))
    for address in sorted(new - old):
        stamped.update(np.frombuffer(udp.mapped(address).tobytes(), stamped.key)[0], 1)
    for address in sorted(old - new):
        stamped.delete(np.frombuffer(udp.mapped(address).tobytes(), stamped.key)[0])
