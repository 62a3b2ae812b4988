"""Every program and filter at TC of an interface, whoever put it there: TCX links in their order, clsact filters.

Looks and changes nothing. In the network namespace of the calling thread; any thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from pytools.errors import SwerveError
from pytools.kernel.bpf import attach, syscall
from pytools.kernel.bpf.compiler_client import bpf_dir

_NAME_AT, _NAME_BYTES = 64, 16  # in struct bpf_prog_info
_HOOKS: Final[tuple[tuple[attach.Direction, int, int], ...]] = (
    ("ingress", syscall.TCX_INGRESS, 0xFFFFFFF2),
    ("egress", syscall.TCX_EGRESS, 0xFFFFFFF3),
)
_ENTRY: Final = re.compile(r"^int (\w+)\(struct __sk_buff \*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Attached:
    interface: str
    direction: attach.Direction
    mechanism: Literal["tcx", "clsact"]
    name: str  # of the program, or the kind of a filter without one; empty when the kernel does not say
    id: int  # of the program; 0 for a filter without one
    ours: bool | None  # None: only CAP_SYS_ADMIN may read the name

    def __str__(self) -> str:
        number = f" (id {self.id})" if self.id else ""
        return f"{self.interface} {self.direction}: {self.mechanism} {self.name or 'program'}{number}"


def on(interface: str, ifindex: int) -> Iterator[Attached]:
    """Everything on one interface, TCX before clsact, each in the order in which it runs."""
    for direction, kind, _ in _HOOKS:
        for program in syscall.tcx_programs(ifindex, kind):
            name = _name(program)
            ours = None if name is None else name in our_names()
            yield Attached(interface, direction, "tcx", name or "", program, ours)
    yield from _clsact(interface, ifindex)


@functools.cache
def our_names() -> frozenset[str]:
    """What the kernel calls our own programs."""
    try:
        texts = [file.read_text() for file in bpf_dir().glob("*.c")]
    except (OSError, SwerveError):
        return frozenset()
    return frozenset(name[: _NAME_BYTES - 1] for text in texts for name in _ENTRY.findall(text))


def _name(program: int) -> str | None:
    try:
        fd = syscall.bpf(syscall.PROG_GET_FD_BY_ID, struct.pack("<3I", program, 0, 0))
    except PermissionError:
        return None
    except OSError:  # gone
        return ""
    try:
        raw = syscall.object_info(fd, syscall.PROG_INFO_BYTES)
    except OSError:
        return ""
    finally:
        os.close(fd)
    return raw[_NAME_AT : _NAME_AT + _NAME_BYTES].split(b"\0")[0].decode(errors="replace")


def _clsact(interface: str, ifindex: int) -> Iterator[Attached]:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        for direction, _, parent in _HOOKS:
            found: list[Any] = []
            with contextlib.suppress(Exception):  # pyroute2's are unrelated; without clsact the dump is refused
                found = list(ip.get_filters(index=ifindex, parent=parent))
            for item in found:
                if not item["handle"]:
                    continue  # the head of a priority, not a filter
                kind, options = item.get_attr("TCA_KIND"), item.get_attr("TCA_OPTIONS")
                named = options.get_attr("TCA_BPF_NAME") if kind == "bpf" and options is not None else None
                number = options.get_attr("TCA_BPF_ID") if kind == "bpf" and options is not None else None
                ours = named in (attach.OBSERVERS.name, attach.STEERING.name)
                yield Attached(interface, direction, "clsact", named or kind or "", number or 0, ours)
