"""Where the kernel lists RDMA devices, and why it lists none.

A sysfs shows the devices of the network namespace in which it was mounted.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys/class/infiniband")


def listed(place: Path = SYSFS) -> list[str]:
    """Names in a directory, like that of the devices; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return os.listdir(place)
    return []


def absent(devices: Path = SYSFS) -> str:
    """Why there is no RDMA device; empty where there is one."""
    if not devices.is_dir():
        return f"this kernel has no RDMA (there is no {devices})"
    return "" if listed(devices) else f"this host has no RDMA device ({devices} is empty)"
