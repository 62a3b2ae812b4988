"""Connections as arrays, made of `tcp_flow` signals, and ranks that may hold them."""

from __future__ import annotations

import zlib

import numpy as np

from pytools.signals import Owner, TcpFlow
from pytools.sources.jobs.environment import Place
from pytools.sources.jobs.processes import Member
from pytools.sources.tcp.connections import COUNTS, Connections, Described


def connections(*flows: TcpFlow, cookie: int = 0) -> Connections:
    """Those of one window; the cookie of each is its local port, unless another is given."""
    return Connections(
        at_ns=flows[0].at_ns,
        cookie=np.array([cookie or each.local_port for each in flows], np.uint64),
        counts=np.array([[getattr(each, name) for name in COUNTS] for each in flows], np.int64),
        ifindex=np.array([zlib.crc32(each.interface.encode()) for each in flows], np.uint32),
        foreign=np.array([each.namespace != "" for each in flows]),
        closed=np.array([each.state == "close" for each in flows]),
        first_ns=np.array([each.first_ns for each in flows], np.int64),
        srtt_ns=np.array([each.srtt_ns or 0 for each in flows], np.int64),
        stalls={at: each.stall for at, each in enumerate(flows) if each.stall is not None},
        describe=lambda at: Described(flows[at].owner, flows[at].path, flows[at].interface),
    )


def member(pid: int, number: int = 0, cgroup: str = "/a") -> Member:
    """A process that is a rank of a job of two."""
    found = Place("env", "", "env:n1:1", False, number, 2, None, "", "")
    return Member(found, Owner(pid, "py", cgroup), 1000, 5, pid, 0)
