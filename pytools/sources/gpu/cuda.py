"""The CUDA driver, as far as reading a GPU's clock needs it: libcuda.so.1 through ctypes, kernels as PTX text.

No CUDA toolkit is needed; the driver compiles the PTX. Any call can take seconds or hang, so this runs in a process of
its own (`pings`), never in the agent. One thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Iterator
from typing import Any, Final

from pytools.errors import CapabilityError

LIBRARY: Final = "libcuda.so.1"
_BLOCKING_AND_MAPPED: Final = 4 | 8  # CU_CTX_SCHED_BLOCKING_SYNC, CU_CTX_MAP_HOST
_PORTABLE_AND_MAPPED: Final = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP

# reflect: `answers[0]` is the time at which the kernel began. For i = 1 to count: when `asked` is i, `answers[i]` is
# the time at which that was seen. ask: the other side on another GPU; `record` gets the times before and after. Both
# end by themselves when an answer is overdue, so that no kernel outlives a process that has stopped asking.
PTX: Final = r"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry reflect(.param .u64 p_asked, .param .u64 p_answers, .param .u32 p_count, .param .u64 p_timeout)
{
    .reg .pred %late, %seen, %done;
    .reg .u32 %i, %count, %asked_for;
    .reg .u64 %asked, %answer, %timeout, %now, %since, %waited;
    ld.param.u64 %asked, [p_asked];
    ld.param.u64 %answer, [p_answers];
    ld.param.u32 %count, [p_count];
    ld.param.u64 %timeout, [p_timeout];
    mov.u32 %i, 1;
    mov.u64 %since, %globaltimer;
    st.relaxed.sys.u64 [%answer], %since;
next:
    add.u64 %answer, %answer, 8;
poll:
    ld.relaxed.sys.u32 %asked_for, [%asked];
    setp.eq.u32 %seen, %asked_for, %i;
    @%seen bra reply;
    mov.u64 %now, %globaltimer;
    sub.u64 %waited, %now, %since;
    setp.gt.u64 %late, %waited, %timeout;
    @%late bra leave;
    bra poll;
reply:
    mov.u64 %since, %globaltimer;
    st.relaxed.sys.u64 [%answer], %since;
    add.u32 %i, %i, 1;
    setp.le.u32 %done, %i, %count;
    @%done bra next;
leave:
    ret;
}

.visible .entry ask(.param .u64 p_asked, .param .u64 p_answers, .param .u64 p_record, .param .u32 p_count,
                    .param .u64 p_timeout)
{
    .reg .pred %late, %seen, %more;
    .reg .u32 %i, %count;
    .reg .u64 %asked, %answer, %record, %timeout, %now, %since, %waited, %stamp;
    ld.param.u64 %asked, [p_asked];
    ld.param.u64 %answer, [p_answers];
    ld.param.u64 %record, [p_record];
    ld.param.u32 %count, [p_count];
    ld.param.u64 %timeout, [p_timeout];
    mov.u32 %i, 0;
    mov.u64 %since, %globaltimer;
    bra poll;
next:
    add.u32 %i, %i, 1;
    setp.le.u32 %more, %i, %count;
    @!%more bra leave;
    add.u64 %answer, %answer, 8;
    mov.u64 %since, %globaltimer;
    st.relaxed.sys.u32 [%asked], %i;
poll:
    ld.relaxed.sys.u64 %stamp, [%answer];
    setp.ne.u64 %seen, %stamp, 0;
    @%seen bra got;
    mov.u64 %now, %globaltimer;
    sub.u64 %waited, %now, %since;
    setp.gt.u64 %late, %waited, %timeout;
    @%late bra leave;
    bra poll;
got:
    mov.u64 %now, %globaltimer;
    st.global.u64 [%record], %since;
    st.global.u64 [%record+8], %stamp;
    st.global.u64 [%record+16], %now;
    add.u64 %record, %record, 24;
    bra next;
leave:
    ret;
}
"""


class CudaError(Exception):
    """A call of the driver failed."""


class Driver:
    """libcuda.

    Raises
    ------
    CapabilityError
        If the library or a usable GPU is missing.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CapabilityError(f"cannot load {LIBRARY}: {error}", "install the NVIDIA driver") from error
        try:
            self.call("cuInit", 0)
        except CudaError as error:
            raise CapabilityError(
                f"CUDA does not start: {error}", "`nvidia-smi` shows whether the driver works"
            ) from error

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises
        ------
        CudaError
            If it is missing, or returns an error.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaError(f"{name} is missing in this driver") from None
        status = function(*arguments)
        if status:
            text = ctypes.c_char_p()
            with contextlib.suppress(AttributeError):
                self._library.cuGetErrorString(status, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode(errors='replace')} ({status})")

    def count(self) -> int:
        """How many GPUs this process may use."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value


class Gpu:
    """A context on one GPU, with the kernels loaded."""

    def __init__(self, driver: Driver, number: int) -> None:
        self.driver = driver
        # its handle in the driver
        device, self.context, self._module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuDeviceGet", ctypes.byref(device), number)
        identity = (ctypes.c_ubyte * 16)()
        driver.call("cuDeviceGetUuid", ctypes.byref(identity), device)
        self.uuid = f"GPU-{uuid.UUID(bytes=bytes(identity))}"  # as NVML writes it
        driver.call("cuCtxCreate_v2", ctypes.byref(self.context), ctypes.c_uint(_BLOCKING_AND_MAPPED), device)
        driver.call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(PTX.encode()))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Have the calls within concern this GPU."""
        self.driver.call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def pinned(self, size: int) -> tuple[memoryview, int]:
        """Host memory that the GPU reaches, zeroed: (here, its address on the GPU). Lives as long as the context."""
        host, device = ctypes.c_void_p(), ctypes.c_uint64()
        with self.current():
            self.driver.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(size), _PORTABLE_AND_MAPPED)
            self.driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), host, 0)
        ctypes.memset(host, 0, size)
        return memoryview((ctypes.c_ubyte * size).from_address(host.value or 0)).cast("B"), device.value

    def launch(self, kernel: str, *arguments: ctypes.c_uint32 | ctypes.c_uint64) -> None:
        function = ctypes.c_void_p()
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        with self.current():
            self.driver.call("cuModuleGetFunction", ctypes.byref(function), self._module, kernel.encode())
            self.driver.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, pointers, None)

    def wait(self) -> None:
        """Wait until the kernel has ended."""
        with self.current():
            self.driver.call("cuCtxSynchronize")

    def close(self) -> None:
        """Destroy the context, and with it what it holds."""
        self.driver.call("cuCtxDestroy_v2", self.context)
