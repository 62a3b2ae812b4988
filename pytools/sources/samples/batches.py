"""Samples on their way from the host that received the packets to the one that sent them: packed, checked. Pure.

A batch names each flow once, in the direction of its packets. Addresses are IPv4-mapped, numbers little-endian, times
nanoseconds of the stamping clock of the host that took the samples. What comes in is a stranger's until it was
checked: `decode` returns nothing that does not make sense.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.estimators.matching import on_grid

BATCHES, ASKS = "samples", "samples.ask"  # topics
VERSION: Final = 1
TCP, UDP = 6, 17
MOST_SAMPLES: Final = 4096  # in one batch: 80 kB
MOST_LEASE_NS: Final = 60 * 10**9

FLOW: Final = np.dtype(
    [
        ("source", "u1", 16),
        ("destination", "u1", 16),
        ("source_port", "<u2"),
        ("destination_port", "<u2"),
        ("protocol", "u1"),
    ]
)
SAMPLE: Final = np.dtype([("at_ns", "<i8"), ("key", "<u8"), ("flow", "<u2")])
_HEADER: Final = struct.Struct("<4sBBBxII")  # magic, version, rates, flows, samples
_ASK: Final = struct.Struct("<4sBxxxQ")  # magic, version, lease
_BATCH_MAGIC, _ASK_MAGIC = b"SWsb", b"SWsa"
_MOST_RATE: Final = 63
_LATEST_NS: Final = 1 << 62


class BadBatchError(SwerveError):
    """What came in is no batch."""


class Batch(NamedTuple):
    """Samples of packets received by the host that sends this."""

    tcp_rate: int  # the coarsest that were in force since the batch before
    udp_rate: int
    flows: NDArray[Any]  # of FLOW
    samples: NDArray[Any]  # of SAMPLE, in the order in which they were taken


def encode(batch: Batch) -> bytes:
    head = _HEADER.pack(_BATCH_MAGIC, VERSION, batch.tcp_rate, batch.udp_rate, len(batch.flows), len(batch.samples))
    return head + batch.flows.tobytes() + batch.samples.tobytes()


def decode(payload: bytes) -> Batch:
    """The batch in a payload.

    Raises
    ------
    BadBatchError
        If it is not one, from beginning to end.
    """
    if len(payload) < _HEADER.size:
        raise BadBatchError("too short")
    magic, version, tcp_rate, udp_rate, flow_count, sample_count = _HEADER.unpack_from(payload)
    if magic != _BATCH_MAGIC or version != VERSION:
        raise BadBatchError(f"not version {VERSION}")
    if sample_count > MOST_SAMPLES or flow_count > sample_count:
        raise BadBatchError("more than fits")
    samples_at = _HEADER.size + flow_count * FLOW.itemsize
    if len(payload) != samples_at + sample_count * SAMPLE.itemsize:
        raise BadBatchError("wrong length")
    if max(tcp_rate, udp_rate) > _MOST_RATE:
        raise BadBatchError("no such rate")
    flows = np.frombuffer(payload, FLOW, flow_count, _HEADER.size)
    samples = np.frombuffer(payload, SAMPLE, sample_count, samples_at)
    _check(flows, samples)
    return Batch(tcp_rate, udp_rate, flows, samples)


def _check(flows: NDArray[Any], samples: NDArray[Any]) -> None:
    is_tcp = flows["protocol"] == TCP
    if not (is_tcp | (flows["protocol"] == UDP)).all():
        raise BadBatchError("neither TCP nor UDP")
    if len(samples) and int(samples["flow"].max()) >= len(flows):
        raise BadBatchError("a sample of no flow")
    if not ((samples["at_ns"] > 0) & (samples["at_ns"] < _LATEST_NS)).all():
        raise BadBatchError("a time that cannot be")
    if (is_tcp[samples["flow"]] & (samples["key"] >> np.uint64(32) != 0)).any():
        raise BadBatchError("a sequence number of more than 32 bits")


def common(batch: Batch, tcp_rate: int, udp_rate: int) -> NDArray[np.bool_]:
    """Which of its samples a host with these rates may have taken as well."""
    rate = np.where(batch.flows["protocol"] == TCP, tcp_rate, udp_rate)
    return on_grid(batch.samples["key"].astype(np.uint64), rate[batch.samples["flow"]])


def encode_ask(lease_ns: int) -> bytes:
    """The request to be sent batches for so long."""
    return _ASK.pack(_ASK_MAGIC, VERSION, lease_ns)


def decode_ask(payload: bytes) -> int:
    """For how long batches are asked for.

    Raises
    ------
    BadBatchError
        If it is no such request.
    """
    if len(payload) != _ASK.size:
        raise BadBatchError("wrong length")
    magic, version, lease_ns = _ASK.unpack(payload)
    if magic != _ASK_MAGIC or version != VERSION or lease_ns > MOST_LEASE_NS:
        raise BadBatchError("no request for samples")
    return int(lease_ns)


def batches(tcp_rate: int, udp_rate: int, flows: NDArray[Any], samples_of: NDArray[Any]) -> list[Batch]:
    """Batches of these samples, as many as it takes; one without samples says that there are none.

    Parameters
    ----------
    flows : ndarray of FLOW
        Of each sample.
    samples_of : ndarray of SAMPLE
        Their `flow` is filled in here.
    """
    made = []
    for begin in range(0, max(len(samples_of), 1), MOST_SAMPLES):
        part = samples_of[begin : begin + MOST_SAMPLES].copy()
        named, part["flow"] = distinct(flows[begin : begin + MOST_SAMPLES])
        made.append(Batch(tcp_rate, udp_rate, named, part))
    return made


def distinct(flows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Each flow once, and which of them each row is."""
    rows = np.ascontiguousarray(flows).view(f"V{FLOW.itemsize}")
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.ones(len(rows), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    which = np.empty(len(rows), np.intp)
    which[order] = np.cumsum(first) - 1
    return np.ascontiguousarray(flows[order[first]]), which
