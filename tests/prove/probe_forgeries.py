"""Proof: probe.c believes no reply that is forged, replayed or mutated, and answers no request that it should not.

    python tests/prove/probe_forgeries.py [--replies 1000000] [--requests 1000000] [--seed N]

The real program, loaded by the kernel, run on one packet after the other (BPF_PROG_TEST_RUN) in a namespace of its own;
the true probes and replies beside them are its own. What is right is decided by tests/prove/_stamp_check.py, which
shares no code with swerve. Replies: none is accepted but the true ones, each forgery is counted, and the delays that
come out are exactly the true ones. Requests: each one that RFC 8762 lets be answered is, by a reply that is right in
every byte, and no other one is. Prints JSON Lines; exits with 1 unless all of it holds. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any, Final

ROOT = File(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/prove")]

import _forged_replies as forging  # noqa: E402
import _mutated_requests as mutating  # noqa: E402
import _stamp_check as check  # noqa: E402
import numpy as np  # noqa: E402
from _mutated_requests import OURS, PEERS  # noqa: E402
from packet_runs import DROPPED, LONGEST, LOOPBACK, REDIRECTED, UNSPEC, PacketRuns  # noqa: E402

from pytools.config import Peer  # noqa: E402
from pytools.kernel import netns  # noqa: E402
from pytools.kernel.bpf import loader  # noqa: E402
from pytools.lab import namespaces  # noqa: E402
from pytools.signals import Path  # noqa: E402
from pytools.sources.probing.paths import PinnedPath, Session  # noqa: E402
from pytools.sources.probing.program import DUPLICATE, ProbeProgram  # noqa: E402
from pytools.sources.probing.udp import families  # noqa: E402

ESTIMATE: Final = 0xC001
SEND, STAMP = 0x5E770001, 0x5E770002  # marks of packets
SENDER_PORT: Final = 5000
SESSIONS: Final = 8
SLOTS: Final = 8  # probes of a session that are remembered
FORGERIES: Final = 25  # between two probes
EXAMPLES: Final = 2  # that are printed of each violation, on standard error
STAMPS: Final = ("t1_ns", "t2_ns", "t3_ns")


class Violations:
    """What should not have happened: how often, and the first few packets."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, what: str, example: str) -> None:
        self.counts[what] += 1
        kept = self.examples.setdefault(what, [])
        if len(kept) < EXAMPLES:
            kept.append(example)

    def show(self) -> None:
        """Print the examples, beside the verdict."""
        for what, packets in self.examples.items():
            print(f"{what}:", *packets, sep="\n  ", file=sys.stderr)


class Program:
    """probe.c, loaded, and the sessions that are probed."""

    def __init__(self, loaded: loader.Loaded, chance: random.Random, other_ifindex: int) -> None:
        self.maps = ProbeProgram(loaded, SLOTS)
        self.out, self.into = loaded.programs["probe_egress"], loaded.programs["probe_ingress"]
        self.maps.set_peers(dict.fromkeys((*PEERS, *OURS), ESTIMATE))
        self.maps.set_locals((*PEERS, *OURS))  # it plays both ends
        self.maps.set_ports([SENDER_PORT])
        self.runs, self.chance, self.other_ifindex = PacketRuns(), chance, other_ifindex
        self.sent = [0] * SESSIONS
        self._before = self.maps.counters()

    def counted(self) -> dict[str, int]:
        """Counters that have moved since the last call, but for bytes."""
        before, self._before = self._before, self.maps.counters()
        moved = {name: value - before[name] for name, value in self._before.items() if name != "wire_bytes"}
        return {name: value for name, value in moved.items() if value}

    def close(self) -> None:
        self.maps.close()


def probed(session: int) -> Session:
    ours, remote = ends(session)
    peer = Peer("b", remote, clock="shared" if shared(session) else "free_running")
    path, family = Path("a", "b", remote, "", "lo"), families([remote])[0]
    pinned = PinnedPath(session, path, peer, family, LOOPBACK, ours, None, False)
    return Session(pinned, SENDER_PORT, session)


def ends(session: int) -> tuple[str, str]:
    """Our address and the peer's of a session."""
    return OURS[session % 2], [each for each in PEERS if (":" in each) == bool(session % 2)][session]


def is_foreign(session: int) -> bool:
    """Whether the peer's replies are those of a reflector that does not know our TLV."""
    return session >= SESSIONS // 2


def shared(session: int) -> bool:
    return session % 4 < 2


def true_reply(program: Program, session: int) -> bytes:
    """Send a probe, reflect it, and stamp the reply: all by the program itself."""
    number, run = program.sent[session], program.runs.run
    program.sent[session] += 1
    (seq,) = program.maps.seq(np.array([session]), np.array([number])).tolist()
    base = struct.pack("!I8xHH28x", seq, ESTIMATE, session + 1)
    payload = base + mutating.tlv(check.SWERVE_TLV, program.chance.randbytes(8).ljust(check.SWERVE_TLV_BYTES, b"\0"))
    pin = struct.pack("!3xBH6x", 1, session)
    frame = check.build(*ends(session), (SENDER_PORT, check.PORT), payload, ethernet=pin)
    steps = ((program.out, SEND, REDIRECTED), (program.out, STAMP, UNSPEC), (program.into, 0, REDIRECTED))
    left_with = 0  # as the reflector marks its reply
    for hook, mark, wanted in (*steps, (program.out, None, UNSPEC)):
        done = run(hook, frame, mark=left_with if mark is None else mark)
        left_with = done.mark
        assert done.verdict == wanted, f"mark {mark}: verdict {done.verdict}, {program.counted()}"
        frame = bytes(12) + done.frame[12:]
    if is_foreign(session):
        at = len(frame) - 4 - check.SWERVE_TLV_BYTES
        frame = check.mended(frame[:at] + b"\x80" + frame[at + 1 :])
    return frame


# ---- replies ----


class Replies:
    """Forgeries round after round, each around one true probe."""

    def __init__(self, program: Program, violations: Violations) -> None:
        self.program, self.violations = program, violations
        self.done: collections.Counter[str] = collections.Counter()
        self.counters: collections.Counter[str] = collections.Counter()
        self.harmless = self.unsummed = self.duplicates = self.true = 0
        self.least_ns = [1 << 62] * SESSIONS  # forward delay of what user space is given
        self.true_least_ns = [1 << 62] * SESSIONS
        self._before = [collections.deque[bytes](maxlen=SLOTS) for _ in range(SESSIONS)]
        for session in range(SESSIONS):
            program.maps.set_path(probed(session).pinned)
            self._begin(session)
            for _ in range(SLOTS):
                self._deliver(session, true_reply(program, session), taken=False)

    def _begin(self, session: int) -> None:
        """Let the kernel forget what it knows of the peer."""
        self.program.maps.forget_session(session)
        self.program.maps.set_session(probed(session))

    def round(self, most: int) -> int:
        """Up to so many forgeries of one kind, and then the true reply; how many there were."""
        chance = self.program.chance
        session, kind = chance.randrange(SESSIONS), chance.choice(tuple(forging.KINDS))
        if kind == "no TLV" and is_foreign(session):
            kind = "guessed numbers"
        old, answered = self._before[session][0], self._before[session][-1]
        reply = true_reply(self.program, session)  # from here on its slot is no longer that of the oldest
        seen = forging.Seen(reply, old, answered, shared(session), self.program.other_ifindex)
        self.program.counted()
        made = ended = 0
        taken = False
        answers = self.program.maps.paths["answered_ns"][session : session + 1]
        before = int(answers[0])
        while made < most and not taken:
            made += 1
            each = forging.forged(kind, seen, chance)
            run = self.program.runs.run(self.program.into, each.frame, ifindex=each.ifindex, segments=each.segments)
            ended += run.verdict == DROPPED
            taken = int(answers[0]) != before
            if taken:
                self._accepted(kind, reply, each.frame)
            if run.verdict not in (DROPPED, UNSPEC) or (run.verdict == UNSPEC and _for_us(each.frame)):
                self.violations.add(f"{kind}: verdict {run.verdict}", each.frame.hex())
        self.done[kind] += made
        counted = self.program.counted()
        self.counters.update(counted)
        if sum(counted.values()) != ended:
            self.violations.add(f"{kind}: not counted", f"{ended} ended, counted {counted}")
        self._given(session, self.program.maps.read())
        self._deliver(session, reply, taken)
        return made

    def _accepted(self, kind: str, true: bytes, frame: bytes) -> None:
        """A frame that is no true reply was taken: that is wrong, unless it says the same as the true one."""
        one, other = check.parse(true), check.parse(frame)
        assert one is not None and other is not None
        if (one.source, one.ports, one.payload) == (other.source, other.ports, other.payload) and other.whole:
            self.harmless += 1  # a bit of a header that says nothing was flipped
            return
        if other.checksum_to_come and other.header_right:
            self.unsummed += 1  # by a chance of 2^-16, as large as that which any checksum leaves
            return
        pairs = enumerate(zip(one.payload, other.payload, strict=False))
        changed = [at for at, (a, b) in pairs if a != b and (4 <= at < 12 or 16 <= at < 24)]
        what = "with other times" if changed else "with other words" if other.whole else "cut"
        right = "right" if other.checksum_right and other.header_right else "wrong"
        self.violations.add(f"{kind}: accepted {what}, checksum {right}", frame.hex())

    def _deliver(self, session: int, reply: bytes, taken: bool) -> None:
        """The true reply comes in after all, and is taken as it is: whatever came before has not spoilt it."""
        self.program.runs.run(self.program.into, reply)
        records = self.program.maps.read()
        packet = check.parse(reply)
        assert packet is not None
        stamps = [_time(packet.payload, at) for at in (28, 16, 4)]
        if len(records) != 1 or [int(records[name][0]) for name in STAMPS] != stamps:
            self.violations.add("a true reply was not recorded as it is", f"session {session} {reply.hex()}")
            self._begin(session)
        elif bool(records["flags"][0] & DUPLICATE) != taken:
            self.violations.add("a true reply was counted as a duplicate, or the other way round", reply.hex())
        self._given(session, records)
        self.true += 1
        self.true_least_ns[session] = min(self.true_least_ns[session], stamps[1] - stamps[0])
        self._before[session].append(reply)

    def _given(self, session: int, records: Any) -> None:
        """What user space is given: it measures by what is no duplicate."""
        for record in records:
            if record["flags"] & DUPLICATE:
                self.duplicates += 1
            else:
                forward = int(record["t2_ns"]) - int(record["t1_ns"])
                self.least_ns[session] = min(self.least_ns[session], forward)


def _for_us(frame: bytes) -> bool:
    packet = check.parse(frame)
    return packet is not None and packet.ports == (check.PORT, SENDER_PORT)


def _time(payload: bytes, at: int) -> int:
    seconds, ns = struct.unpack_from("!II", payload, at)
    return int(seconds * 10**9 + ns)


# ---- requests ----


class Requests:
    """Mutated requests, one after the other."""

    def __init__(self, program: Program, violations: Violations) -> None:
        self.program, self.violations = program, violations
        program.maps.set_locals(OURS)
        self.done: collections.Counter[str] = collections.Counter()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.counters: collections.Counter[str] = collections.Counter()
        self._peers, self._ours = mutating.packed((*PEERS, *OURS)), mutating.packed(OURS)

    def one(self) -> None:
        """One request, and what becomes of it."""
        program = self.program
        request = mutating.mutated(program.chance)
        if len(request.frame) > LONGEST:
            return
        self.done[request.how] += 1
        packet = check.parse(request.frame)
        refusal = check.refusal(packet, self._peers, self._ours, bytes(6)) or ("merged" if request.segments > 1 else "")
        began_ns = time.monotonic_ns()
        run = program.runs.run(program.into, request.frame, segments=request.segments)
        if run.verdict != REDIRECTED:
            self.outcomes[refusal or "unanswered"] += 1
            if not refusal:
                self.violations.add(f"{request.how}: a right request was not answered", request.frame.hex())
            return
        run = program.runs.run(program.out, run.frame, mark=run.mark)
        times_ns = began_ns, time.monotonic_ns()
        if run.verdict != UNSPEC or run.mark:
            self.violations.add(f"{request.how}: the reply does not leave", request.frame.hex())
        if refusal:
            self.violations.add(f"answered, although {refusal}", request.frame.hex())
        self.outcomes["answered"] += 1
        if packet is not None and not refusal:
            for fault in check.faults(packet, run.frame, times_ns, ESTIMATE):
                self.violations.add(f"{request.how}: reply: {fault}", f"{request.frame.hex()} {run.frame.hex()}")


# ---- all of it ----


@contextlib.contextmanager
def loaded_program(seed: int) -> Iterator[Program]:
    """The program in a namespace of its own, which has our addresses and a second interface."""
    name = f"swerve-prove-forgeries-{os.getpid()}"
    namespaces.create(name)
    try:
        for words in (
            ("link", "set", "lo", "up"),
            *(("address", "add", address, "dev", "lo") for address in OURS),
            ("link", "add", "other", "type", "veth", "peer", "name", "another"),
        ):
            subprocess.run(["ip", "-n", name, *words], check=True)
        with netns.inside(name):
            other = socket.if_nametoindex("other")
            defines = {"SWERVE_PROBE_PORT": check.PORT}
            with loader.load([loader.Program("probe.c", ("probe_egress", "probe_ingress"), defines)]) as loaded:
                if loaded.failed:
                    raise SystemExit(f"probe.c cannot be loaded: {loaded.failed}")
                program = Program(loaded, random.Random(seed), other)
                try:
                    yield program
                finally:
                    program.close()
    finally:
        namespaces.delete(name)


def say(**line: object) -> None:
    print(json.dumps({"proof": "probe_forgeries", **line}), flush=True)


def finish(part: str, began_s: float, proven: bool, seed: int, violations: Violations, **found: object) -> bool:
    """Print what was found; returns `proven`."""
    violations.show()
    violated = dict(violations.counts.most_common())
    seconds = round(time.monotonic() - began_s, 1)
    say(part=part, proven=proven, seed=seed, **found, violations=violated, seconds=seconds)
    return proven


def prove_replies(seed: int, count: int) -> bool:
    violations = Violations()
    with loaded_program(seed) as program:
        replies, done, began_s = Replies(program, violations), 0, time.monotonic()
        while done < count:
            done += replies.round(min(FORGERIES, count - done))
    poisoned = [s for s in range(SESSIONS) if replies.least_ns[s] < replies.true_least_ns[s]]
    proven = not violations.counts and not poisoned
    return finish(
        *("replies", began_s, proven, seed, violations),
        forged=dict(sorted(replies.done.items())),
        counted=dict(sorted(replies.counters.items())),
        duplicates=replies.duplicates,
        say_the_same=replies.harmless,
        taken_for_unsummed=replies.unsummed,
        true_replies=replies.true,
        bases_poisoned=len(poisoned),
    )


def prove_requests(seed: int, count: int) -> bool:
    violations = Violations()
    with loaded_program(seed) as program:
        requests, began_s = Requests(program, violations), time.monotonic()
        for _ in range(count):
            requests.one()
        counted = program.counted()
    return finish(
        *("requests", began_s, not violations.counts, seed, violations),
        mutated=dict(sorted(requests.done.items())),
        outcomes=dict(requests.outcomes.most_common()),
        counted=counted,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replies", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    proven = [prove_replies(given.seed, given.replies), prove_requests(given.seed, given.requests)]
    return 0 if all(proven) else 1


if __name__ == "__main__":
    sys.exit(main())
