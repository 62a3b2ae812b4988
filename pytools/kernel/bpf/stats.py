"""BPF run-time statistics: on only while somebody holds them on (they cost ~70 ns a hit at TC)."""

from __future__ import annotations

import os
from types import TracebackType

from pytools.kernel.bpf import syscall


class RunTime:
    """Context in which the kernel times programs; read them with `bpf.program_run_time`."""

    def __enter__(self) -> RunTime:
        self._fd = syscall.enable_stats()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
