"""RDMA costs nothing where there is none: programs are compiled and tables made once there is a device.

Until then this says why nothing is seen. Compiling takes a second in a child; the agent goes on meanwhile. One thread:
the agent's.
"""

from __future__ import annotations

import contextlib
import selectors
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path as File
from typing import TYPE_CHECKING, Final

from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.ipc.bus import Bus
from pytools.kernel.bpf.compiler_client import Compilation
from pytools.kernel.rdma_class import absent
from pytools.signals import Path, RdmaSight, header

if TYPE_CHECKING:
    from pytools.sources.rdma.source import RdmaSource

_LOOK_NS: Final = 1_000_000_000
_AGAIN_NS: Final = 60_000_000_000  # after a compilation that failed


class RdmaWhenThere:
    """Waits for the first RDMA device, then runs an `RdmaSource`.

    Parameters
    ----------
    answering : callable
        The measured paths, and whether each answers its probes.
    tap_socket : Path
        Where tapped processes ask for their table.
    """

    def __init__(
        self,
        config: AgentConfig,
        bus: Bus,
        path_of: Callable[[str, str], Path | None],
        answering: Callable[[], Mapping[Path, bool]],
        tap_socket: File,
    ) -> None:
        self._config, self._bus, self._tap_socket = config, bus, tap_socket
        self._path_of, self._answering = path_of, answering
        self.programs: dict[str, int] = {}
        self.failed: ChainMap[str, str] = ChainMap()
        self._selector: selectors.BaseSelector | None = None
        self._compilation: Compilation | None = None
        self._source: RdmaSource | None = None
        self._closing = contextlib.ExitStack()
        self._again_ns = 0

    def register(self, selector: selectors.BaseSelector) -> None:
        """Keep the selector: what is to be waited for comes with the first device."""
        self._selector = selector

    def tick(self, now_ns: int) -> int:
        """Look whether there is a device, or do what the source has to do."""
        if self._source is not None:
            return self._source.tick(now_ns)
        if self._compilation is None and now_ns >= self._again_ns and not absent():
            self._begin(now_ns)
        if self._bus.wanted("rdma_sight"):
            self._bus.publish(self._sight(now_ns))
        return now_ns + _LOOK_NS

    def drops(self) -> dict[str, int]:
        return self._source.drops() if self._source is not None else {}

    def close(self) -> None:
        if self._compilation is not None:
            self._compilation.close()
        self._closing.close()

    def _begin(self, now_ns: int) -> None:
        from pytools.sources.rdma import providers

        self._again_ns = now_ns + _AGAIN_NS
        try:
            self._compilation = Compilation([providers.program()])
        except (SwerveError, OSError) as error:
            self.failed["rdma.c"] = str(error)
            return
        assert self._selector is not None
        self._selector.register(self._compilation, selectors.EVENT_READ, self._finish)

    def _finish(self, _mask: int) -> None:
        """The child has answered: take what it loaded, and start."""
        assert self._compilation is not None and self._selector is not None
        compilation, self._compilation = self._compilation, None
        self._selector.unregister(compilation)
        try:
            self._start(compilation)
        except SwerveError as error:
            self.failed["rdma.c"] = str(error)

    def _start(self, compilation: Compilation) -> None:
        from pytools.kernel.bpf import loader
        from pytools.sources.rdma.providers import Uprobes
        from pytools.sources.rdma.source import RdmaSource
        from pytools.sources.rdma.table import Way
        from pytools.sources.rdma.tap_server import TapServer

        with contextlib.ExitStack() as undo:
            loaded = undo.enter_context(loader.collect(compilation))
            ways: list[Way] = []
            failed: list[MutableMapping[str, str]] = []
            if self._config.rdma.uprobes != "off":
                uprobes = undo.enter_context(contextlib.closing(Uprobes(loaded)))
                ways.append(uprobes)
                failed.append(uprobes.failed)
            if self._config.rdma.tap and loaded.has_map("rdma_table"):
                rows = loaded.map("rdma_table")
                per_user = self._config.rdma.tap_tables_per_user
                ways.append(TapServer(self._tap_socket, rows.value, rows.max_entries, per_user))
            source = RdmaSource(self._config, self._bus, self._path_of, self._answering, ways)
            undo.pop_all()
        assert self._selector is not None
        self._closing.enter_context(loaded)
        self._closing.enter_context(contextlib.closing(source))
        source.register(self._selector)
        self.programs.update(loaded.programs)
        self.failed.clear()  # of earlier attempts
        self.failed.update(loaded.failed)
        self.failed.maps.extend(failed)
        self._source = source

    def _sight(self, now_ns: int) -> RdmaSight:
        if self._compilation is not None:
            reason = "its programs are being compiled"
        else:
            reason = self.failed.get("rdma.c") or absent() or "a device has just come"
        return RdmaSight(
            **header(self._config.host, now_ns),
            available=False,
            reason=reason,
            providers=[],
            seen={},
            hits_per_s=0.0,
            tap_processes=0,
        )
