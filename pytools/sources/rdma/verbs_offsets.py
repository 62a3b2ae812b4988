"""A child process that finds the functions behind the verbs, as places in files, whether or not those have symbols.

Most verbs are inline calls through tables of pointers that a provider fills when a device is opened and a queue made;
so this opens each device, makes what is needed, and reads the tables. Runs as a script on the standard library alone: a
provider's library may print, hang or crash, and stays out of the agent. Answers on standard output:

{"functions": {verb: [[path, offset], ...]}, "problems": [sentence, ...]}
"""

from __future__ import annotations

import contextlib
import ctypes as c
import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

LOCK_BYTES = {"x86_64": 40 + 48, "aarch64": 48 + 48}  # pthread_mutex_t and pthread_cond_t lie in verbs' structures
LIBRARY = "libibverbs.so.1"

# Places of pointers: in struct ibv_context (after the device, the table of operations) and, before it, verbs_context.
_CONTEXT = {"poll_cq": 11, "post_srq_recv": 20, "post_send": 25, "post_recv": 26}
_OPERATIONS_BYTES = 8 + 32 * 8
_CREATE_QP_EX, _CREATE_CQ_EX, _SIZE_FIELD = -56, -120, -8
_EXTENDED = 2**64 - 1  # of abi_compat: the context is the end of a verbs_context

_QP_EX = [
    "wr_atomic_cmp_swp",
    "wr_atomic_fetch_add",
    "wr_bind_mw",
    "wr_local_inv",
    "wr_rdma_read",
    "wr_rdma_write",
    "wr_rdma_write_imm",
    "wr_send",
    "wr_send_imm",
    "wr_send_inv",
    "wr_send_tso",
    "wr_set_ud_addr",
    "wr_set_xrc_srqn",
    "wr_set_inline_data",
    "wr_set_inline_data_list",
    "wr_set_sge",
    "wr_set_sge_list",
    "wr_start",
    "wr_complete",
    "wr_abort",
    "wr_atomic_write",
]
# Which kind of request a builder is for: enum ibv_qp_create_send_ops_flags.
_BITS = {
    "wr_rdma_write": 1 << 0,
    "wr_rdma_write_imm": 1 << 1,
    "wr_send": 1 << 2,
    "wr_send_imm": 1 << 3,
    "wr_rdma_read": 1 << 4,
    "wr_atomic_cmp_swp": 1 << 5,
    "wr_atomic_fetch_add": 1 << 6,
    "wr_local_inv": 1 << 7,
    "wr_bind_mw": 1 << 8,
    "wr_send_inv": 1 << 9,
    "wr_send_tso": 1 << 10,
    "wr_atomic_write": 1 << 12,
}
_CQ_EX = [
    "start_poll",
    "next_poll",
    "end_poll",
    "read_opcode",
    "read_vendor_err",
    "read_byte_len",
    "read_imm_data",
    "read_qp_num",
]
_QP_TYPES = (2, 3, 4)  # RC, UC, UD
_WC_FLAGS = (0b111, 0b1111111)  # byte length, immediate, queue pair; and all that every device is to know
_EXPORTED = {"create_qp": "1.1", "modify_qp": "1.1", "destroy_qp": "1.1"}


class _Capacities(c.Structure):
    _fields_ = [(name, c.c_uint32) for name in ("send", "receive", "send_sge", "receive_sge", "inline")]


class _QpAttributes(c.Structure):
    _fields_ = [
        ("qp_context", c.c_void_p),
        ("send_cq", c.c_void_p),
        ("receive_cq", c.c_void_p),
        ("srq", c.c_void_p),
        ("capacities", _Capacities),
        ("qp_type", c.c_int),
        ("signal_all", c.c_int),
        ("mask", c.c_uint32),
        ("pd", c.c_void_p),
        ("xrcd", c.c_void_p),
        ("create_flags", c.c_uint32),
        ("tso_header", c.c_uint16),
        ("indirection", c.c_void_p),
        ("hash", c.c_uint64 * 3),
        ("source_qpn", c.c_uint32),
        ("send_operations", c.c_uint64),
    ]


class _CqAttributes(c.Structure):
    _fields_ = [
        ("entries", c.c_uint32),
        ("cq_context", c.c_void_p),
        ("channel", c.c_void_p),
        ("vector", c.c_uint32),
        ("wc_flags", c.c_uint64),
        ("mask", c.c_uint32),
        ("flags", c.c_uint32),
        ("parent", c.c_void_p),
    ]


class Finder:
    """What was found so far, of all devices."""

    def __init__(self, library: str) -> None:
        self.functions: dict[str, list[tuple[str, int]]] = {}
        self.problems: list[str] = []
        self._verbs = verbs = c.CDLL(library, mode=c.RTLD_GLOBAL, use_errno=True)
        self._lock = LOCK_BYTES[platform.machine()]
        self._maps: list[tuple[int, int, int, str]] = []
        pointer = c.c_void_p
        for name, result, *arguments in (
            ("ibv_get_device_list", c.POINTER(pointer), c.POINTER(c.c_int)),
            ("ibv_get_device_name", c.c_char_p, pointer),
            ("ibv_open_device", pointer, pointer),
            ("ibv_close_device", c.c_int, pointer),
            ("ibv_alloc_pd", pointer, pointer),
            ("ibv_dealloc_pd", c.c_int, pointer),
            ("ibv_create_cq", pointer, pointer, c.c_int, pointer, pointer, c.c_int),
            ("ibv_destroy_cq", c.c_int, pointer),
            ("ibv_destroy_qp", c.c_int, pointer),
        ):
            function = getattr(verbs, name)
            function.restype, function.argtypes = result, arguments

    def devices(self) -> int:
        """Look behind each device; returns how many there are."""
        count = c.c_int()
        devices = self._verbs.ibv_get_device_list(c.byref(count))
        for index in range(count.value):
            name = self._verbs.ibv_get_device_name(devices[index]).decode(errors="replace")
            context = self._verbs.ibv_open_device(devices[index])
            if not context:
                self.problems.append(f"{name} cannot be opened: {os.strerror(c.get_errno())}")
                continue
            for verb, place in _CONTEXT.items():
                self._note(verb, context + 8 + 8 * place)
            with contextlib.ExitStack() as given_back:
                given_back.callback(self._verbs.ibv_close_device, context)
                self._look_behind(name, context)
        return count.value

    def _look_behind(self, name: str, context: int) -> None:
        pd = self._verbs.ibv_alloc_pd(context)
        cq = self._verbs.ibv_create_cq(context, 16, None, None, 0)
        if not pd or not cq:
            self.problems.append(f"{name}: no protection domain or completion queue: {os.strerror(c.get_errno())}")
            return
        with contextlib.ExitStack() as given_back:
            given_back.callback(self._verbs.ibv_dealloc_pd, pd)
            given_back.callback(self._verbs.ibv_destroy_cq, cq)
            create = self._operation(context, _CREATE_QP_EX)
            if create:
                self._note("create_qp_ex", context + _CREATE_QP_EX)
                self._queue_pairs(name, context, pd, cq, create)
            create = self._operation(context, _CREATE_CQ_EX)
            if create:
                self._completion_queues(name, context, create)

    def _operation(self, context: int, place: int) -> int:
        """An operation of the verbs_context, whose end the context is; 0 where this one is too old to have it."""
        # After the operations three integers, padding, the mutex.
        compatible = context + _OPERATIONS_BYTES + 16 + self._lock - 48
        if _pointer(compatible) != _EXTENDED:
            return 0
        size = _pointer(context + _SIZE_FIELD)
        whole = compatible + 8 - context  # of struct ibv_context
        return _pointer(context + place) if size >= whole - place else 0

    def _queue_pairs(self, name: str, context: int, pd: int, cq: int, create: int) -> None:
        """Extended queue pairs of every type, with as many kinds of requests as the device knows."""
        make = c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.POINTER(_QpAttributes), use_errno=True)(create)

        def made(qp_type: int, operations: int) -> bool:
            attributes = _QpAttributes(
                send_cq=cq, receive_cq=cq, qp_type=qp_type, mask=1 | 1 << 6, pd=pd, send_operations=operations
            )
            attributes.capacities = _Capacities(4, 4, 1, 1, 0)
            qp = make(context, c.byref(attributes))
            if not qp:
                return False
            start = qp + (64 + self._lock + 4 + 7) // 8 * 8 + 24
            for place, verb in enumerate(_QP_EX):
                if operations & _BITS.get(verb, operations):
                    self._note(verb, start + 8 * place)
            self._verbs.ibv_destroy_qp(qp)
            return True

        any_made = False
        for qp_type in _QP_TYPES:
            any_made |= any([made(qp_type, bit) for bit in _BITS.values()])
        if not any_made:
            self.problems.append(f"{name} has no extended way to post: {os.strerror(c.get_errno())}")

    def _completion_queues(self, name: str, context: int, create: int) -> None:
        """Extended completion queues, shared by threads or not: providers have functions for each."""
        make = c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.POINTER(_CqAttributes), use_errno=True)(create)
        any_made = False
        for wc_flags in _WC_FLAGS:
            for single_threaded in (0, 1):
                attributes = _CqAttributes(16, None, None, 0, wc_flags, single_threaded, single_threaded, None)
                cq = make(context, c.byref(attributes))
                if not cq:
                    continue
                any_made = True
                start = cq + 32 + self._lock + 24
                for place, verb in enumerate(_CQ_EX):
                    self._note(verb, start + 8 * place)
                self._verbs.ibv_destroy_cq(cq)
        if not any_made:
            self.problems.append(f"{name} has no extended way to poll: {os.strerror(c.get_errno())}")

    def exported(self) -> None:
        """Functions that the library itself exports, in the version that applications are linked against."""
        look_up = c.CDLL(None).dlvsym
        look_up.restype, look_up.argtypes = c.c_void_p, [c.c_void_p, c.c_char_p, c.c_char_p]
        for verb, version in _EXPORTED.items():
            found = look_up(self._verbs._handle, f"ibv_{verb}".encode(), f"IBVERBS_{version}".encode())
            if found:
                self._place(verb, found)
            else:
                self.problems.append(f"the library has no ibv_{verb}@IBVERBS_{version}")

    def _note(self, verb: str, where: int) -> None:
        """The function that the pointer there points to."""
        function = _pointer(where)
        if function:
            self._place(verb, function)

    def _place(self, verb: str, function: int) -> None:
        place = self._in_file(function)
        if place is None:
            self._maps = list(_executable_maps())
            place = self._in_file(function)
        if place is None:
            self.problems.append(f"{verb} lies in no file")
        elif place not in self.functions.setdefault(verb, []):
            self.functions[verb].append(place)

    def _in_file(self, function: int) -> tuple[str, int] | None:
        for start, end, offset, path in self._maps:
            if start <= function < end:
                return path, function - start + offset
        return None


def _pointer(address: int) -> int:
    return c.c_uint64.from_address(address).value


def _executable_maps() -> Iterator[tuple[int, int, int, str]]:
    with open("/proc/self/maps") as file:
        for line in file:
            span, rights, offset, _, inode, *path = line.split(maxsplit=5)
            if "x" in rights and inode != "0" and path:
                start, end = (int(part, 16) for part in span.split("-"))
                yield start, end, int(offset, 16), path[0].strip()


def find(library: str) -> dict[str, Any]:
    """Everything, of every device, as `main` prints it."""
    if platform.machine() not in LOCK_BYTES:
        return {"functions": {}, "problems": [f"verbs are not known for the machine type {platform.machine()}"]}
    try:
        finder = Finder(library)
    except (OSError, AttributeError) as error:
        return {"functions": {}, "problems": [f"{library} cannot be used: {error}"]}
    if not finder.devices():
        finder.problems.append(f"{library} finds no device")
    else:
        finder.exported()
    return {"functions": finder.functions, "problems": finder.problems}


def main() -> None:
    """Answer on what was standard output; what providers print there goes to standard error."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answer:
        json.dump(find(sys.argv[1] if len(sys.argv) > 1 else LIBRARY), answer)


if __name__ == "__main__":
    main()
