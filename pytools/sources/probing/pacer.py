"""What schedule.py shares with pacer.c: the memory layout, and the messages on the control socket.

pacer.c explains each. The pacer reports its layout when it is ready; it must equal this one.
"""

from __future__ import annotations

from typing import Final

PLANNED, BEGUN, DONE, CPU, WAITING, ENTRIES, ROWS, APART_BYTES, APART_NS, SENT_BYTES = range(10)
FIRST_ENTRY: Final = 16
DUE, TOO_LATE, BEGAN, GROUPS, FIRST_GROUP = range(5)
GROUP_WORDS, MOST_GROUPS = 3, 6
ENTRY_WORDS: Final = FIRST_GROUP + GROUP_WORDS * MOST_GROUPS
HEADER_BYTES: Final = 64  # struct mmsghdr
RESULT_AT: Final = 56  # in it
LAYOUT: Final = FIRST_ENTRY << 16 | ENTRY_WORDS << 8 | HEADER_BYTES

READY, HOLD, HELD, GO, OVERDUE = b"R", b"H", b"D", b"G", b"O"
