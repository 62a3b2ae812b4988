"""bcc's tcpretrans as it is, on a machine without kernel headers: what it counts beside us.

Our header tree stands in for the kernel's; the two kernel structures that the tool looks into are given by their first
fields, which have lain there for as long as the tool exists. It counts buffers, of all network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import tcp_kit as kit

COMMAND: Final = "tcpretrans-bpfcc"  # Debian's package bpfcc-tools
_ROOT: Final = Path(__file__).resolve().parents[1]
_SOCK: Final = """#include <linux/types.h>
#define AF_INET 2
#define AF_INET6 10
struct sock_common { u64 skc_addrpair; u32 skc_hash; u32 skc_portpair; u16 skc_family; u8 skc_state; };
struct sock { struct sock_common __sk_common; };
struct sk_buff { char before[40]; char cb[48]; };
"""
_TCP: Final = "struct tcp_skb_cb { u32 seq; };\n"
_FORWARDED: Final = ("if_ether", "if_vlan", "if_arp", "in", "ip", "ipv6", "tcp", "udp", "pkt_cls")
_LINE: Final = re.compile(r"\[(\S+)\]#(\d+)\s+<->\s+\[(\S+)\]#(\d+)\s+(\d+)")

Flow = tuple[str, int, str, int]


@contextlib.contextmanager
def counting() -> Iterator[Callable[[], dict[Flow, int]]]:
    """Have it count; the call ends it, and returns events by local and remote address and port."""
    with tempfile.TemporaryDirectory(prefix="swerve-tcpretrans-") as folder:
        headers = Path(folder)
        _write_headers(headers)
        multiarch = sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu"
        process = subprocess.Popen(
            [COMMAND, "-c"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "BCC_KERNEL_SOURCE": str(headers),
                "CPATH": f"/usr/include:/usr/include/{multiarch}",
                "PYTHONUNBUFFERED": "1",
            },
        )
        try:
            kit.wait_for_output(process, b"Tracing retransmits")

            def stop() -> dict[Flow, int]:
                process.send_signal(signal.SIGINT)
                return parsed(process.communicate(timeout=60)[0].decode())

            yield stop
        finally:
            process.kill()
            process.communicate()


def parsed(text: str) -> dict[Flow, int]:
    """The table that it prints in the end."""
    assert "RETRANSMITS" in text, text
    return {
        (local, int(local_port), remote, int(remote_port)): int(events)
        for local, local_port, remote, remote_port, events in _LINE.findall(text)
    }


def _write_headers(place: Path) -> None:
    shutil.copytree(_ROOT / "bpf" / "include", place / "include", symlinks=False)
    (place / "include" / "net").mkdir()
    (place / "include" / "net" / "sock.h").write_text(_SOCK)
    (place / "include" / "net" / "tcp.h").write_text(_TCP)
    for name in _FORWARDED:
        forward = place / "include" / "uapi" / "linux" / f"{name}.h"
        if not forward.exists():
            forward.write_text(f"#include_next <linux/{name}.h>\n")
