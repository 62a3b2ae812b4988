"""The GPUs of ranks as evidence, from the signal `gpu`: by the processes that have a context there, or by RAS.

Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pytools.estimators.job_evidence import GpuUse
from pytools.ipc.bus import Published
from pytools.signals import Gpu

TAG: Final = "gpu"
_DEVICE: Final = Path("/dev/nvidiactl")
_STALE: Final = 3  # windows
_MOST: Final = 64
_AGAIN_NS: Final = 10 * 10**9  # it is looked again whether there are GPUs


class Gpus:
    """The newest of each GPU of this host."""

    def __init__(self, device: Path = _DEVICE) -> None:
        self._device = device
        self._newest: dict[int, Gpu] = {}
        self._has, self._look_ns = False, 0

    def offer(self, published: Published) -> None:
        """Take a signal of this kind."""
        record = published.signal
        if isinstance(record, Gpu) and (record.gpu in self._newest or len(self._newest) < _MOST):
            self._newest[record.gpu] = record

    def of(self, ranks: Mapping[int, Iterable[int]], known: Mapping[int, int], now_ns: int) -> tuple[list[GpuUse], str]:
        """The GPUs of ranks, and why those of some are not known.

        Parameters
        ----------
        ranks : mapping
            Processes by rank.
        known : mapping
            Index of the GPU by rank, as far as RAS says.
        """
        fresh = [each for each in self._newest.values() if now_ns - each.at_ns <= _STALE * each.window_ns]
        if not fresh and not self._has_gpus(now_ns):
            return [], ""
        everybody = frozenset(itertools.chain.from_iterable(ranks.values()))
        nobodys = {each.gpu for each in fresh if everybody.isdisjoint(each.processes)}
        found: list[GpuUse] = []
        without = []
        for rank, pids in ranks.items():
            own = [each for each in fresh if not set(each.processes).isdisjoint(pids)]
            if not own:  # anybody may answer as RAS, so NVML's word on processes goes before it
                own = [each for each in fresh if known.get(rank) == each.gpu and each.gpu in nobodys]
            found += [_use(rank, each) for each in own]
            if not own:
                without.append(rank)
        if not without:
            return found, ""
        if not fresh:
            return found, "no recent reading of a GPU"
        return found, f"the GPUs of ranks {', '.join(map(str, sorted(without)[:8]))} are not known"

    def _has_gpus(self, now_ns: int) -> bool:
        if now_ns >= self._look_ns:
            self._has, self._look_ns = self._device.exists(), now_ns + _AGAIN_NS
        return self._has

    def forget(self) -> None:
        self._newest.clear()


def _use(rank: int, record: Gpu) -> GpuUse:
    faults = {
        "uncorrected ECC errors": record.ecc_uncorrected or 0,
        "PCIe replays": record.pcie_replays or 0,
        "NVLink errors": record.link_errors or 0,
        **{f"XID {each}": record.xids.count(each) for each in record.xids},
        "calls that hang" if record.state == "hung" else "losses of the GPU": int(record.state in ("hung", "lost")),
    }
    return GpuUse(
        rank,
        record.gpu,
        None if record.sm_mhz is None else round(record.sm_mhz),
        record.sm_max_mhz,
        record.busy,
        {each.reason: each.share for each in record.clock_reasons},
        {name: count for name, count in faults.items() if count},
    )
