"""Which BPF programs, maps and links the kernel has, and which of them a process holds. Any thread."""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
from pathlib import Path
from typing import Final

from pytools.kernel.bpf import syscall

# BPF_PROG_GET_NEXT_ID, BPF_MAP_GET_NEXT_ID, BPF_LINK_GET_NEXT_ID
_NEXT: Final = {"prog": 11, "map": 12, "link": 31}


def numbered() -> set[tuple[str, int]]:
    """All that there are, whoever made them: kind and number.

    Numbers are listed, nothing is opened: a program array that somebody opens and closes (`bpftool map` does) while the
    kernel is about to empty it keeps a reference for good (kernel/bpf/arraymap.c, prog_array_map_clear(), which does
    not look at what schedule_work() returns).
    """
    return {(kind, number) for kind in _NEXT for number in _numbers(kind)}


def _numbers(kind: str) -> set[int]:
    found: set[int] = set()
    request = ctypes.create_string_buffer(12)  # the number before, the next one, flags
    with contextlib.suppress(FileNotFoundError):  # there is none above
        while True:
            syscall.call(_NEXT[kind], request, len(request))
            (number,) = struct.unpack_from("<I", request, 4)
            found.add(number)
            struct.pack_into("<I", request, 0, number)
    return found


def held_by(process: Path) -> set[tuple[str, int]]:
    """Those to which a process, /proc/PID, has a descriptor; fewer where it ends meanwhile."""
    found: set[tuple[str, int]] = set()
    for place in (process / "fdinfo").iterdir():
        with contextlib.suppress(OSError):
            lines = re.findall(r"^(\w+)_id:\s*(\d+)$", place.read_text(), re.MULTILINE)
            found |= {(kind, int(number)) for kind, number in lines if kind in _NEXT}
    return found
