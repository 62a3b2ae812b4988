"""How large a packet each path takes: sends one of full size along every path, and searches when it does not return.

Works in rounds per path: some sizes, and behind them the smallest, which shows that the path is alive. A round is over
when all are back, or a moment after the smallest is: what left before it and has not come by then is gone. Where full
size has passed so far, the smallest is sent only if full size has not come back when it is looked for.
docs/links.md says how and why. Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.estimators import packet_sizes
from pytools.estimators.packet_sizes import Shot, Sizes
from pytools.ipc.bus import Bus
from pytools.signals import LinkEvent, PathMtu, header
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.size_probes import LARGEST, SMALLEST, SizeProbes, Told
from pytools.sources.source import RELAXED_NS, Source, next_beat
from pytools.units import MS

_POLL_NS: Final = 5 * MS  # while a search is under way
_POLL_LATE_NS: Final = 20 * MS
_WAIT_NS: Final = 250 * MS  # at most, for the replies of rounds in which nothing is suspected
MOST_A_SECOND: Final = 50  # such rounds of all paths together: with many paths, each has one less often
_GRACE_NS: Final = 5 * MS  # for what was overtaken by the smallest
_AGAIN_NS: Final = 50 * MS  # the smallest is sent again when it was not answered by then; then after twice as long
_TOLD_FOR_NS: Final = 10_000 * MS  # routers limit how often they tell
_TOGETHER: Final = 8  # paths whose large packets may leave at once
_SLOTS: Final = 5  # the paths' rounds are dealt over an interval, so that not all large packets leave at once
MOST_SEARCHES: Final = 16  # rounds of searches under way at once
_NEVER_NS: Final = 1 << 62
_SEQ_MASK: Final = 0xFFFF_FFFF


class _Round:
    """What is under way along a path."""

    def __init__(self, shots: Sequence[Shot], began_ns: int) -> None:
        self.shots, self.began_ns = shots, began_ns
        self.passed = [False] * len(shots)
        self.place: dict[int, int] = {}  # by sequence number
        self.smallest: set[int] = set()  # sequence numbers
        self.smallest_due_ns = 0  # when to send one more
        self.wait_ns = 0  # for replies, before anything is suspected
        self.alive_ns = 0  # when the first of the smallest came back
        self.sent_all = True

    @property
    def complete(self) -> bool:
        return self.alive_ns != 0 and all(self.passed)

    def over(self, now_ns: int, timeout_ns: int) -> bool:
        """Whether there is nothing to wait for any more."""
        if self.complete:
            return True
        if self.alive_ns and now_ns >= self.alive_ns + _GRACE_NS:
            return True
        return now_ns >= self.began_ns + timeout_ns


class _Watched:
    def __init__(self, pinned: PinnedPath, probes: SizeProbes, due_ns: int) -> None:
        self.pinned, self.probes, self.due_ns = pinned, probes, due_ns
        self.sizes = Sizes(SMALLEST[pinned.family], SMALLEST[pinned.family])
        self.mtu_bytes = 0
        self.longest = 0  # request that the reflector answers; 0: it does not say
        self.told: Told | None = None
        self.told_ns = 0
        self.hint_bytes: int | None = None  # what another path by the same interface was found to take
        self.round: _Round | None = None
        self.suspected_ns = 0  # when the round began that gave rise to a search
        self.published: tuple[int | None, int | None] | None = None  # the mismatch that was told of


class PathMtuSource(Source):
    """Publishes `path_mtu` once per long window and when it changes, and `mtu_mismatch` and `mtu_agrees` at once.

    Parameters
    ----------
    paths : callable
        The paths that are probed now.
    """

    def __init__(self, config: AgentConfig, bus: Bus, paths: Callable[[], Sequence[PinnedPath]]) -> None:
        self._config, self._bus, self._paths = config, bus, paths
        self._interval_ns = int(config.links.mtu_interval_s * 1e9)
        self._every_ns = self._interval_ns
        self._timeout_ns = int(config.probe.timeout_ms * MS)
        self._wait_ns = min(_WAIT_NS, self._timeout_ns // 2)
        self._window_ns = config.windows.long_ns
        self._window_end_ns = 0
        self._known: Sequence[PinnedPath] = ()
        self._try_again_ns = _NEVER_NS  # to open sockets that could not be had
        self.watched: dict[PinnedPath, _Watched] = {}  # what is known of each path to which sizes are probed
        self._hurried = False  # a search is under way
        self._next_seq = 0
        self._gone_wire_bytes = 0  # of sockets that are closed
        self._drops = dict.fromkeys(("mtu_no_socket", "mtu_send_refused", "mtu_late_replies"), 0)

    def tick(self, now_ns: int) -> int:
        """Take what came back, finish rounds, begin those that are due; returns when to be called again."""
        if not self._interval_ns:
            return now_ns + self._window_ns
        if not self._window_end_ns:
            self._window_end_ns = now_ns + self._window_ns
        self._follow(now_ns)
        for watched in self.watched.values():
            self._advance(watched, now_ns)
        searches = sum(1 for watched in self.watched.values() if watched.round and watched.sizes.urgent)
        for watched in self.watched.values():
            if watched.round is not None:
                continue
            if watched.sizes.urgent and searches < MOST_SEARCHES:
                searches += 1
                self._begin(watched, now_ns)
            elif not watched.sizes.urgent and now_ns >= watched.due_ns:
                self._begin(watched, now_ns)
        if now_ns >= self._window_end_ns:
            self._window_end_ns = next_beat(self._window_end_ns, self._window_ns, now_ns)
            for watched in self.watched.values():
                self._publish(watched, now_ns)
        return self._next(now_ns)

    def _next(self, now_ns: int) -> int:
        due_ns = self._window_end_ns
        self._hurried = False
        for watched in self.watched.values():
            look_ns = watched.round.began_ns + watched.round.wait_ns if watched.round else watched.due_ns
            if watched.sizes.urgent or (watched.round and now_ns >= look_ns):
                self._hurried = True
                return now_ns + _POLL_NS
            due_ns = min(due_ns, look_ns)
        return due_ns

    def late_ns(self) -> int:
        """How late we may be called."""
        return _POLL_LATE_NS if self._hurried else RELAXED_NS

    def _follow(self, now_ns: int) -> None:
        """Open sockets for new paths, close those of paths that are gone."""
        current = self._paths()
        if current is self._known and now_ns < self._try_again_ns:
            return
        self._known, self._try_again_ns = current, _NEVER_NS
        for pinned in self.watched.keys() - set(current):
            probes = self.watched.pop(pinned).probes
            self._gone_wire_bytes += probes.wire_bytes
            probes.close()
        slots = min(_SLOTS, -(-len(current) // _TOGETHER))
        self._every_ns = max(self._interval_ns, len(current) * 1_000_000_000 // MOST_A_SECOND)
        for pinned in current:
            if pinned in self.watched:
                continue
            try:
                probes = SizeProbes(pinned, self._config.probe.port, self._config.probe.dscp)
            except SwerveError:
                self._drops["mtu_no_socket"] += 1
                self._try_again_ns = now_ns + self._window_ns
                continue
            due_ns = now_ns + self._every_ns * (pinned.index % slots) // slots
            self.watched[pinned] = _Watched(pinned, probes, due_ns)

    # ---- one path ----

    def _advance(self, watched: _Watched, now_ns: int) -> None:
        """Take what came back; end the round if it is over."""
        under_way = watched.round
        if under_way is None:
            return
        self._take(watched, under_way, now_ns)
        if under_way.over(now_ns, self._timeout_ns):
            self._finish(watched, under_way, now_ns)
        elif not under_way.alive_ns and now_ns >= under_way.smallest_due_ns:
            self._send_smallest(watched, under_way, now_ns)

    def _begin(self, watched: _Watched, now_ns: int) -> None:
        if not watched.sizes.urgent:
            watched.due_ns = next_beat(watched.due_ns, self._every_ns, now_ns)
            mtu_bytes = watched.probes.interface_mtu()
            if mtu_bytes is None:
                return
            watched.mtu_bytes = mtu_bytes
            if now_ns > watched.told_ns + _TOLD_FOR_NS:
                watched.told = None
            watched.sizes = packet_sizes.resized(watched.sizes, _full(mtu_bytes, watched))
        told = watched.hint_bytes if watched.told is None else watched.told.mtu_bytes
        if told != watched.sizes.told:
            watched.sizes = replace(watched.sizes, told=told)
        under_way = _Round(packet_sizes.shots(watched.sizes), now_ns)
        under_way.wait_ns = self._wait_ns if watched.hint_bytes is None else min(self._wait_ns, _AGAIN_NS)
        for place, shot in enumerate(under_way.shots):
            seq = self._seq()
            under_way.place[seq] = place
            code = watched.probes.send(shot.size, seq, now_ns, shot.short_reply)
            # ENOBUFS is a fate like any other on the way: the far end of a veth pair may be the one that refuses.
            if code in (errno.EAGAIN, errno.EMSGSIZE):  # it never left this host
                self._drops["mtu_send_refused"] += 1
                under_way.sent_all = False
        if watched.sizes.settled:
            under_way.smallest_due_ns = now_ns + under_way.wait_ns
        else:
            self._send_smallest(watched, under_way, now_ns)
        watched.round = under_way

    def _send_smallest(self, watched: _Watched, under_way: _Round, now_ns: int) -> None:
        seq = self._seq()
        under_way.smallest.add(seq)
        under_way.smallest_due_ns = now_ns + (_AGAIN_NS << min(len(under_way.smallest) - 1, 8))
        watched.probes.send(SMALLEST[watched.pinned.family], seq, now_ns, True)

    def _seq(self) -> int:
        self._next_seq = (self._next_seq + 1) & _SEQ_MASK
        return self._next_seq

    def _take(self, watched: _Watched, under_way: _Round, now_ns: int) -> None:
        for reply in watched.probes.replies():
            if reply.seq in under_way.smallest:
                under_way.alive_ns = under_way.alive_ns or now_ns
                watched.longest = reply.longest
            elif reply.seq in under_way.place:
                place = under_way.place[reply.seq]
                shot = under_way.shots[place]
                # One that was cut short on its way proves nothing.
                under_way.passed[place] = shot.short_reply or reply.size == shot.size
                if not under_way.smallest:
                    under_way.alive_ns = now_ns
            elif reply.size > SMALLEST[watched.pinned.family]:  # the smallest may be sent more often than is needed
                self._drops["mtu_late_replies"] += 1  # its round was over
            if under_way.complete:
                return
        told = watched.probes.told()
        if told is not None and told.mtu_bytes < watched.sizes.full:
            watched.told, watched.told_ns = told, now_ns

    def _finish(self, watched: _Watched, under_way: _Round, now_ns: int) -> None:
        """Learn from a round, and tell what is news."""
        watched.round = None
        before = watched.sizes
        if not under_way.alive_ns and not any(under_way.passed):
            watched.sizes = packet_sizes.silence(before)
        elif _full(watched.mtu_bytes, watched) != before.full:
            watched.sizes = packet_sizes.resized(before, _full(watched.mtu_bytes, watched))
            return  # the reflector answers less than was thought: what did not come back says nothing
        elif under_way.sent_all:
            watched.sizes = packet_sizes.learn(before, under_way.shots, under_way.passed, bool(watched.longest))
        else:
            watched.sizes = replace(before, phase="watch")
        if watched.sizes.urgent and not before.urgent:
            watched.suspected_ns = under_way.began_ns
        if watched.sizes.verdict == "agrees":
            watched.told = None
        self._tell(watched, under_way, now_ns)
        if (watched.sizes.verdict, watched.sizes.works) != (before.verdict, before.works):
            self._publish(watched, now_ns)

    # ---- telling ----

    def _tell(self, watched: _Watched, under_way: _Round, now_ns: int) -> None:
        """An event, when the verdict is another than what was told of."""
        sizes = watched.sizes
        if sizes.verdict == "mismatch" and watched.published != (sizes.works, sizes.fails):
            watched.published = (sizes.works, sizes.fails)
            self._publish_event(watched, now_ns, watched.suspected_ns, _mismatch_words(watched))
            self._look_at_others(watched, now_ns)
        elif sizes.verdict == "agrees" and watched.published is not None:
            watched.published = None
            words = f"packets of {sizes.full} bytes pass again to {watched.pinned.path.destination} and back"
            self._publish_event(watched, now_ns, under_way.began_ns, words)
            self._look_at_others(watched, now_ns)

    def _look_at_others(self, watched: _Watched, now_ns: int) -> None:
        """What befell one path has often befallen all by the same interface: look at them now."""
        for other in self.watched.values():
            if other.pinned.ifindex == watched.pinned.ifindex and other.sizes.verdict != watched.sizes.verdict:
                other.due_ns = min(other.due_ns, now_ns)
                other.hint_bytes = watched.sizes.works

    def _publish_event(self, watched: _Watched, now_ns: int, happened_ns: int, detail: str) -> None:
        sizes, path = watched.sizes, watched.pinned.path
        values = {"interface_mtu_bytes": watched.mtu_bytes}
        for name, value in (
            ("works_bytes", sizes.works),
            ("fails_bytes", sizes.fails),
            ("told_bytes", watched.told.mtu_bytes if watched.told else None),
        ):
            if value is not None:
                values[name] = value
        if sizes.verdict == "mismatch":
            values |= {"forward_fails": int(sizes.narrow == "forward"), "reverse_fails": int(sizes.narrow == "reverse")}
        self._bus.publish(
            LinkEvent(
                **header(self._config.host, now_ns),
                interface=path.interface,
                paths=[path],
                what="mtu_mismatch" if sizes.verdict == "mismatch" else "mtu_agrees",
                happened_ns=happened_ns,
                detail=detail,
                values=values,
            )
        )

    def _publish(self, watched: _Watched, now_ns: int) -> None:
        sizes = watched.sizes
        self._bus.publish(
            PathMtu(
                **header(self._config.host, now_ns),
                path=watched.pinned.path,
                interface_mtu_bytes=watched.mtu_bytes,
                works_bytes=sizes.works,
                fails_bytes=sizes.fails,
                told_bytes=watched.told.mtu_bytes if watched.told else None,
                told_by=watched.told.by if watched.told else "",
                state=sizes.verdict,
            )
        )

    # ---- for the agent ----

    def wire_bytes(self) -> int:
        """Bytes of these probes and their replies so far, with Ethernet, IP and UDP headers."""
        return self._gone_wire_bytes + sum(watched.probes.wire_bytes for watched in self.watched.values())

    def drops(self) -> dict[str, int]:
        """What was not sent, and what came too late."""
        return dict(self._drops)

    def close(self) -> None:
        for watched in self.watched.values():
            watched.probes.close()
        self.watched = {}


def _full(mtu_bytes: int, watched: _Watched) -> int:
    """What is tried: as much as the interface takes, if the reflector answers as much; never less than can be asked."""
    return max(min(mtu_bytes, watched.longest or LARGEST, LARGEST), SMALLEST[watched.pinned.family])


def _mismatch_words(watched: _Watched) -> str:
    sizes, path = watched.sizes, watched.pinned.path
    way = {"forward": f"to {path.destination}", "reverse": f"from {path.destination}", "unknown": "there or back"}
    words = f"the interface takes {watched.mtu_bytes} bytes, the way {way[sizes.narrow]} {sizes.works}"
    if watched.told is None:
        return f"{words}; nobody has told this host that larger packets do not pass"
    return f"{words}; {watched.told.by} says {watched.told.mtu_bytes}"
