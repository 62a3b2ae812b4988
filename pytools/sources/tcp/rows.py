"""Rows of the kernel's table of connections as signals, and as arrays.

A row is a copy of all that the kernel program keeps of a connection, so no state is kept here. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.kernel.addresses import texts
from pytools.signals import CongestionTimes, Owner, Path, Retransmissions, Stall, TcpFlow
from pytools.sources.tcp.connections import COUNTS, Connections, Described
from pytools.sources.tcp.owners import Identity

CLOSED: Final = 16  # enum swerve_tcp_flag
_ECN_NEGOTIATED: Final = 1
_LOSS: Final = 4  # TCP_CA_Loss
_STALLS: Final = 64  # connections in it that are asked about at once
_NO_RTT: Final = 0xFFFFFFFF
_NEVER_LOST: Final = 0x7FFFFFFF  # TCP_INFINITE_SSTHRESH
_CONGESTIONS: Final = dict(enumerate(("open", "disorder", "cwr", "recovery", "loss")))
_STATES: Final = (
    *("none", "established", "syn_sent", "syn_recv", "fin_wait1", "fin_wait2", "time_wait", "close", "close_wait"),
    *("last_ack", "listen", "closing", "new_syn_recv"),
)
_SAME_NAME: Final = (
    *("retransmitted_bytes", "timeouts", "sent_bytes", "received_bytes", "segments_out", "segments_in"),
    *("zero_windows", "resets_sent", "resets_received"),
)


class Rows:
    """Makes signals of rows.

    Parameters
    ----------
    host : str
        Whose connections these are.
    name : callable
        An interface's name by its index.
    owner : callable
        Who holds a connection, by its cookie and its control group.
    ask : callable
        Told of each connection whose process is not known, with the time.
    namespace : callable
        What a network namespace is called, by its cookie, a control group in it, and the time.
    stall : callable
        Asks the kernel whether a connection waits for its retransmission timer.
    """

    def __init__(
        self,
        host: str,
        name: Callable[[int], str],
        path_of: Callable[[str, str], Path | None],
        owner: Callable[[int, int], Owner],
        ask: Callable[[Identity, int], None],
        namespace: Callable[[int, int, int], str],
        stall: Callable[[Identity], Stall | None],
    ) -> None:
        self._host, self._name, self._path_of = host, name, path_of
        self._owner, self._ask, self._namespace, self._stall = owner, ask, namespace, stall

    def signals(
        self,
        keys: NDArray[Any],
        rows: NDArray[Any],
        drops: Sequence[dict[str, int]],
        stalls: Mapping[int, Stall],
        now_ns: int,
        unix_ns: int,
    ) -> Iterator[TcpFlow]:
        """A signal of each row; `drops` are the packets of each that were dropped, by reason."""
        counts = rows["counts"]
        interfaces = [self._interface(ifindex) for ifindex in rows["ifindex"].tolist()]
        remotes = texts(keys["remote"]["bytes"])
        fields: dict[str, list[Any]] = {
            "local": texts(keys["local"]["bytes"]),
            "local_port": keys["local_port"].tolist(),
            "remote": remotes,
            "remote_port": keys["remote_port"].tolist(),
            "interface": interfaces,
            "path": [self._path_of(*where) for where in zip(remotes, interfaces, strict=True)],
            "owner": self._owners(keys, rows, now_ns),
            "namespace": [
                self._namespace(*each, now_ns)
                for each in zip(rows["netns"].tolist(), rows["cgroup"].tolist(), strict=True)
            ],
            "state": [_state(number) for number in rows["state"].tolist()],
            "retransmitted": [Retransmissions(*causes) for causes in counts["retransmitted"].tolist()],
            "retransmitted_segments": counts["retransmitted"].sum(axis=1).tolist(),
            "spurious_segments": counts["spurious"].tolist(),
            "srtt_ns": known(rows["srtt_us"].astype(np.int64) * 1000, rows["srtt_us"] > 0),
            "min_rtt_ns": known(rows["min_rtt_us"].astype(np.int64) * 1000, rows["min_rtt_us"] != _NO_RTT),
            "cwnd_segments": known(rows["cwnd"], rows["cwnd"] > 0),
            "ssthresh_segments": known(rows["ssthresh"], rows["ssthresh"] < _NEVER_LOST),
            "delivery_rate_bps": known(*delivery_rates(rows)),
            "ecn": ["negotiated" if flags & _ECN_NEGOTIATED else "off" for flags in rows["ecn_flags"].tolist()],
            "delivered_segments": counts["delivered"].tolist(),
            "delivered_ce_segments": counts["delivered_ce"].tolist(),
            "congestion": [_CONGESTIONS.get(state, "unknown") for state in rows["congestion"].tolist()],
            "congestion_times": [CongestionTimes(*times) for times in rows["congestion_ns"].tolist()],
            "drops": list(drops),
            "stall": [stalls.get(at) for at in range(len(rows))],
            **{name: rows[name].tolist() for name in ("first_ns", "last_ns", "acknowledged_bytes")},
            **{name: counts[name].tolist() for name in _SAME_NAME},
        }
        common: dict[str, Any] = {"host": self._host, "at_ns": now_ns, "unix_ns": unix_ns}
        for values in zip(*fields.values(), strict=True):
            yield TcpFlow(**common, **dict(zip(fields, values, strict=True)))

    def connections(
        self, keys: NDArray[Any], rows: NDArray[Any], stalls: Mapping[int, Stall], now_ns: int
    ) -> Connections:
        """The same connections, as arrays."""
        counts = rows["counts"]
        summed = {"retransmitted_segments": counts["retransmitted"].sum(axis=1)}
        numbers = [summed[name] if name in summed else counts[name] for name in COUNTS]

        def describe(at: int) -> Described:
            interface = self._interface(int(rows["ifindex"][at]))
            (remote,) = texts(keys["remote"]["bytes"][at : at + 1])
            (owner,) = self._owners(keys[at : at + 1], rows[at : at + 1], now_ns)
            return Described(owner, self._path_of(remote, interface), interface)

        return Connections(
            now_ns,
            cookie=rows["cookie"],
            counts=np.stack(numbers, axis=1).astype(np.int64),
            ifindex=rows["ifindex"],
            foreign=rows["netns"] != 0,
            closed=rows["flags"] & CLOSED != 0,
            first_ns=rows["first_ns"].astype(np.int64),
            srtt_ns=rows["srtt_us"].astype(np.int64) * 1000,
            stalls=stalls,
            describe=describe,
        )

    def _interface(self, ifindex: int) -> str:
        return self._name(ifindex) if ifindex else ""

    def stalls(self, keys: NDArray[Any], rows: NDArray[Any]) -> dict[int, Stall]:
        """By position, of the rows in state Loss: the kernel says whether they still are."""
        lost = (rows["congestion"] == _LOSS) & (rows["netns"] == 0) & (rows["flags"] & CLOSED == 0)
        asked = {at: self._stall(identity(keys[at], rows[at])) for at in np.flatnonzero(lost)[:_STALLS].tolist()}
        return {at: stall for at, stall in asked.items() if stall is not None}

    def _owners(self, keys: NDArray[Any], rows: NDArray[Any], now_ns: int) -> list[Owner]:
        owners = [self._owner(*each) for each in zip(rows["cookie"].tolist(), rows["cgroup"].tolist(), strict=True)]
        for at, owner in enumerate(owners):
            if not owner.pid and not rows["netns"][at] and not rows["flags"][at] & CLOSED:
                self._ask(identity(keys[at], rows[at]), now_ns)
        return owners


def identity(key: np.void, row: np.void) -> Identity:
    """A connection as the kernel can be asked for it."""
    return Identity(
        key["local"]["bytes"].tobytes(),
        int(key["local_port"]),
        key["remote"]["bytes"].tobytes(),
        int(key["remote_port"]),
        int(row["ifindex"]),
        int(row["cookie"]),
    )


def delivery_rates(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Bits per second as last measured by the kernel, and where it has been."""
    interval_us = rows["rate_interval_us"].astype(np.float64)
    measured = (interval_us > 0) & (rows["rate_delivered"] > 0)
    bits = rows["rate_delivered"].astype(np.float64) * rows["mss"] * 8
    return (bits * 1e6 / np.maximum(interval_us, 1)).astype(np.int64), measured


def _state(number: int) -> str:
    return _STATES[number] if number < len(_STATES) else f"state_{number}"


def known(values: NDArray[Any], where: NDArray[np.bool_]) -> list[int | None]:
    """Numbers, and None where there are none."""
    return [value if there else None for value, there in zip(values.tolist(), where.tolist(), strict=True)]
