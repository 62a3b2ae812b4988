"""RDMA ports as the kernel shows them under /sys/class/infiniband, and what drivers' names for their counters mean.

Reading blocks: a hardware driver may ask its firmware for each file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools.kernel.addresses import text
from pytools.kernel.rdma_class import SYSFS, listed

_NO_COUNTERS: Final = frozenset({"lifespan"})  # a setting: for how long the kernel keeps what it read
_EMPTY_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"

# Fields of RdmaPort -> the counters that say so, by driver; those of a port's own driver are added up.
MEANINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "cnp_received": (
        *("rp_cnp_handled", "rp_cnp_ignored"),  # mlx5
        "rx_cnp_pkts",  # bnxt_re
        *("cnpHandled", "cnpIgnored"),  # irdma
        "rx_rdma_cnp_pkts",  # ionic
    ),
    "cnp_sent": ("np_cnp_sent", "tx_cnp_pkts", "cnpSent", "tx_rdma_cnp_pkts"),
    "ecn_marked": ("np_ecn_marked_roce_packets", "rx_ecn_marked_pkts", "RxECNMrkd", "rx_rdma_ecn_pkts"),
    "out_of_sequence": (
        "out_of_sequence",  # mlx5
        "oos_drop_count",  # bnxt_re
        "out_of_seq_request",  # rxe
        "resp_rx_outouf_seq",  # ionic
    ),
    "timeouts": (
        "local_ack_timeout_err",  # mlx5
        "to_retransmits",  # bnxt_re
        "retry_exceeded_err",  # rxe
        "retrans_timeout_events",  # efa
        "tx_rdma_ack_timeout",  # ionic
    ),
    "receiver_not_ready": (
        *("rnr_nak_retry_err", "out_of_buffer"),  # mlx5
        "rnr_naks_rcvd",  # bnxt_re
        *("rcvd_rnr_err", "send_rnr_err"),  # rxe
        *("resp_rx_outof_buf", "req_rx_rnr_retry_err"),  # ionic
        "rx_drops",  # efa: no receive was posted
    ),
}


@dataclass(frozen=True, slots=True, order=True)
class Port:
    device: str
    number: int

    def __str__(self) -> str:
        return f"{self.device}/{self.number}"


class Sysfs:
    """Reads RDMA ports; devices are listed at `root`."""

    def __init__(self, root: Path = SYSFS) -> None:
        self._root = root

    def ports(self) -> list[Port]:
        return sorted(
            Port(device, int(number))
            for device in listed(self._root)
            for number in listed(self._root / device / "ports")
            if number.isdigit()
        )

    def state(self, port: Port) -> str:
        """The kernel's word for the state in lower case, like `active`; empty when the port is gone."""
        return self._read(port, "state").rpartition(":")[2].strip().lower()

    def rate(self, port: Port) -> str:
        """The kernel's words for the rate."""
        return self._read(port, "rate")

    def counters(self, port: Port) -> dict[str, int]:
        """All counters by the kernel's names; what is no number is left out."""
        place = self._place(port)
        found = dict(_numbers(place / "counters"))
        found.update(_numbers(place / "hw_counters"))
        if not (place / "hw_counters").exists():  # some drivers count by device
            found.update(_numbers(self._root / port.device / "hw_counters"))
        return found

    def gids(self, port: Port) -> dict[int, str]:
        """Address and type of every GID that is set, by index."""
        found = {}
        for index in listed(self._place(port) / "gids"):
            gid = self._read(port, f"gids/{index}")
            if gid and gid != _EMPTY_GID and index.isdigit():
                found[int(index)] = f"{_address(gid)} {self._read(port, f'gid_attrs/types/{index}')}".strip()
        return dict(sorted(found.items()))

    def interface(self, port: Port, gids: Iterable[int]) -> str:
        """The network interface beneath the first of these GIDs that has one; empty for none."""
        names = (self._read(port, f"gid_attrs/ndevs/{index}") for index in gids)
        return next((name for name in names if name), "")

    def index_of(self, interface: str) -> int | None:
        """The index of a network interface where this sysfs was mounted."""
        text = _read(self._root.parent / "net" / interface / "ifindex")
        return int(text) if text.isdigit() else None

    def _place(self, port: Port) -> Path:
        return self._root / port.device / "ports" / str(port.number)

    def _read(self, port: Port, name: str) -> str:
        return _read(f"{self._root}/{port.device}/ports/{port.number}/{name}")


def meanings(counters: Mapping[str, int]) -> dict[str, int | None]:
    """What the counters say; None where the device does not count it."""
    return {
        what: sum(counters[name] for name in names if name in counters)
        if any(name in counters for name in names)
        else None
        for what, names in MEANINGS.items()
    }


def _address(gid: str) -> str:
    try:
        return text(gid)
    except ValueError:
        return gid


def _numbers(place: Path) -> Iterator[tuple[str, int]]:
    for name in listed(place):
        text = "" if name in _NO_COUNTERS else _read(f"{place}/{name}")
        if text.isdigit():
            yield name, int(text)


def _read(place: str | Path) -> str:
    """A small file's text; empty when it is not there, or the kernel has nothing to say."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 4096).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)
