"""Everything that calls NVML, in threads of its own: one opens it and waits for XID errors, one for each GPU asks.

A call may block for seconds, or for ever when a driver hangs: then only its thread waits, and `hung` says so. A session
that is stopped while a call hangs is left behind; `over` becomes true when its threads have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from pytools.kernel.features import NVML_PACKAGE
from pytools.sources.gpu.queries import Query, queries
from pytools.sources.gpu.readings import Readings

HUNG_NS: Final = 2 * 10**9  # a call that has not returned for so long
_SHARE: Final = 1000  # a query is repeated after so many times what it took
_UNSUPPORTED_NS: Final = 600 * 10**9  # until a query that is not supported is tried again
_FAILED_NS: Final = 10 * 10**9
_XID_WAIT_MS: Final = 250
_LEAVE_S: Final = 1.0
_MOST_GPUS: Final = 64


@dataclass(frozen=True)
class Identity:
    """What does not change of a GPU."""

    index: int
    uuid: str
    name: str
    pci: str


class Calling:
    """Which call of NVML a thread is in, and since when."""

    def __init__(self) -> None:
        self._call: tuple[str, int] | None = None

    @contextlib.contextmanager
    def calling(self, name: str) -> Any:
        """Mark the thread as being in this call."""
        self._call = name, time.monotonic_ns()
        try:
            yield
        finally:
            self._call = None

    def hung(self, now_ns: int) -> str:
        """The call that has not returned, and for how long; empty: none."""
        call = self._call
        if call is None or now_ns - call[1] < HUNG_NS:
            return ""
        return f"{call[0]} has not returned for {(now_ns - call[1]) // 10**9} s"


class Worker(Calling):
    """Asks one GPU, each query at its interval."""

    def __init__(self, nvml: Any, handle: Any, identity: Identity, stop: threading.Event) -> None:
        super().__init__()
        self.identity, self.readings = identity, Readings()
        self.lost = ""  # why the GPU answers no more
        self._lost_by: Query | None = None  # what said so; until that succeeds
        self._nvml, self._stop = nvml, stop
        self._due: list[tuple[int, Query]] = [(0, query) for query in queries(nvml, handle, self.readings)]
        self.handle = handle
        self.thread = threading.Thread(target=self._run, name=f"swerve-gpu{identity.index}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for place, (due_ns, query) in enumerate(self._due):
                if self._stop.is_set():
                    return
                if due_ns <= time.monotonic_ns():
                    self._due[place] = self._ask(query), query
            next_ns = min(due_ns for due_ns, _ in self._due)
            self._stop.wait(max(0.001, (next_ns - time.monotonic_ns()) * 1e-9))

    def _ask(self, query: Query) -> int:
        """Run a query; returns when it is due again."""
        begin_ns = time.monotonic_ns()
        nvml = self._nvml
        pause_ns, reason, lost = query.every_ns, "", ""
        try:
            self.readings.query = query.name
            with self.calling(query.name):
                query.run()
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound) as error:
            pause_ns, reason = _UNSUPPORTED_NS, str(error)
        except nvml.NVMLError as error:
            pause_ns, reason = max(pause_ns, _FAILED_NS), str(error)
            if isinstance(error, (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired)):
                lost = reason
        self.readings.fail(query.name, reason)
        if lost:
            self.lost, self._lost_by = lost, query
        elif query is self._lost_by:
            self.lost, self._lost_by = "", None
        now_ns = time.monotonic_ns()
        return now_ns + max(pause_ns, _SHARE * (now_ns - begin_ns))


class Session(Calling):
    """NVML from its initialisation to its shutdown."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[Worker] = []  # one for each GPU, once NVML is open
        self.problem = ""  # why there are none
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swerve-gpu", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether all threads have ended."""
        return not self._thread.is_alive() and not any(worker.thread.is_alive() for worker in self.workers)

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Have the threads end; waits for none."""
        self._stop.set()

    def _run(self) -> None:
        try:
            with self.calling(f"the import of {NVML_PACKAGE}"):
                import pynvml as nvml
        except Exception as error:  # a package of another project may have that name
            self.problem = f"cannot import pynvml: {error}: pip install {NVML_PACKAGE}"
            return
        try:
            with self.calling("nvmlInit_v2"):
                nvml.nvmlInit()
        except nvml.NVMLError as error:
            self.problem = f"nvmlInit_v2: {error}"
            return
        try:
            self._open(nvml)
            self._wait(nvml)
        except nvml.NVMLError as error:
            self.problem = str(error)
        self._stop.wait()
        for worker in self.workers:
            worker.thread.join(_LEAVE_S)
        if not any(worker.thread.is_alive() for worker in self.workers):
            with contextlib.suppress(nvml.NVMLError), self.calling("nvmlShutdown"):
                nvml.nvmlShutdown()

    def _open(self, nvml: Any) -> None:
        with self.calling("nvmlDeviceGetCount_v2"):
            count = min(nvml.nvmlDeviceGetCount(), _MOST_GPUS)
        found, problems = [], []
        for index in range(count):
            try:
                with self.calling(f"nvmlDeviceGetHandleByIndex_v2({index})"):
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    pci = str(nvml.nvmlDeviceGetPciInfo(handle).busId)
                    identity = Identity(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), pci)
            except nvml.NVMLError as error:
                problems.append(f"GPU {index}: {error}")
                continue
            found.append(Worker(nvml, handle, identity, self._stop))
        self.workers = found
        self.problem = "; ".join(problems) or ("" if found else "NVML finds no GPU")

    def _wait(self, nvml: Any) -> None:
        """Wait for XID errors until the session is stopped."""
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            for worker in self.workers:
                worker.readings.fail("nvmlEventSetCreate", str(error))
            return
        by_handle = {}
        for worker in self.workers:
            try:
                with self.calling("nvmlDeviceRegisterEvents"):
                    nvml.nvmlDeviceRegisterEvents(worker.handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError as error:
                worker.readings.fail("nvmlDeviceRegisterEvents", str(error))
            else:
                by_handle[_address(worker.handle)] = worker
        while by_handle and not self._stop.is_set():
            try:
                with self.calling("nvmlEventSetWait_v2"):
                    event = nvml.nvmlEventSetWait_v2(events, _XID_WAIT_MS)
            except nvml.NVMLError_Timeout:
                continue
            except nvml.NVMLError as error:
                for worker in by_handle.values():
                    worker.readings.fail("nvmlEventSetWait_v2", str(error))
                break
            source = by_handle.get(_address(event.device))
            if source is not None and event.eventType & nvml.nvmlEventTypeXidCriticalError:
                source.readings.xid(event.eventData)
        with contextlib.suppress(nvml.NVMLError), self.calling("nvmlEventSetFree"):
            nvml.nvmlEventSetFree(events)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
