"""What tells one build of a library from another: the identifier that the linker puts in, a digest of the content.

Any thread.
"""

from __future__ import annotations

import os
import stat
import struct

from pytools import directories

_NOTE, _BUILD_ID = 4, 3  # PT_NOTE, NT_GNU_BUILD_ID
_PROGRAM_HEADER_BYTES, _MOST_NOTES_BYTES = 56, 1 << 16


def build_id(path: str) -> str:
    """The identifier in hexadecimal digits; empty when the file has none or cannot be read.

    Whoever started a process chose the file: it may be no library, and no file.
    """
    try:
        with open(path, "rb", opener=directories.without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            header = file.read(64)
            if header[:6] != b"\x7fELF\x02\x01":
                return ""
            table, entry_bytes, entries = *struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54)
            if entry_bytes != _PROGRAM_HEADER_BYTES:
                return ""
            file.seek(table)
            programs = file.read(entry_bytes * entries)
            for start in range(0, len(programs) - entry_bytes + 1, entry_bytes):
                kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", programs, start)
                if kind == _NOTE:
                    file.seek(offset)
                    found = _in_notes(file.read(min(size, _MOST_NOTES_BYTES)))
                    if found:
                        return found
    except (OSError, ValueError, OverflowError, struct.error):  # no such place in any file, for one
        pass
    return ""


def _in_notes(notes: bytes) -> str:
    place = 0
    while place + 12 <= len(notes):
        name_bytes, content_bytes, kind = struct.unpack_from("<III", notes, place)
        name = place + 12
        content = name + (name_bytes + 3) // 4 * 4
        if kind == _BUILD_ID and notes[name : name + name_bytes] == b"GNU\0":
            return notes[content : content + content_bytes].hex()
        place = content + (content_bytes + 3) // 4 * 4
    return ""
