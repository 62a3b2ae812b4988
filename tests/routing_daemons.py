"""Routing daemons of others in a test's namespace, and who writes to its routes.

Imported as `routing_daemons`. FRR, bird, systemd-networkd, NetworkManager, dhclient and the server that it
asks, dnsmasq. The sockets of FRR and bird lie in a directory of the namespace's name below /run/frr or /run; the others
have a /run of their own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import shutil
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import support

from pytools.kernel.netns import inside

FRR = Path("/usr/lib/frr")
_RUN = Path("/run")
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence number, port of whoever caused it
_GROUPS = (7, 8, 11, 19, 32)  # RTNLGRP_IPV4_ROUTE, IPV4_RULE, IPV6_ROUTE, IPV6_RULE, NEXTHOP
_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_ATTRIBUTE = struct.Struct("=HH")
_KINDS = {  # and bytes of its head
    24: ("route", 12),
    25: ("no route", 12),
    32: ("rule", 12),
    33: ("no rule", 12),
    104: ("nexthop", 8),
    105: ("no nexthop", 8),
}
_SUBJECT = 1  # RTA_DST, NHA_ID

Change = tuple[str, str]  # what happened, and to what


@contextlib.contextmanager
def frr(netns: str, zebra: str = "", **daemons: str) -> Iterator[None]:
    """Zebra and others, such as staticd and bgpd, with these configurations."""
    support.require("vtysh")
    place = _RUN / "frr" / netns
    place.mkdir(parents=True)
    shutil.chown(place, "frr", "frr")
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name, text in {"zebra": zebra, **daemons}.items():
            file = place / f"{name}.conf"
            file.write_text(f"hostname {netns}\nlog file {place}/log\n{text}")
            shutil.chown(file, "frr", "frr")
            running.append(_start(netns, [str(FRR / name), "-N", netns, "-f", str(file), "-P", "0"]))
            support.wait_until((place / f"{name}.vty").exists, 20, f"{name} serves")
        yield
    finally:
        _end(running)
        shutil.rmtree(place)
        with contextlib.suppress(OSError):
            place.parent.rmdir()


@contextlib.contextmanager
def bird(netns: str, configuration: str) -> Iterator[Bird]:
    """A bird with this configuration."""
    support.require("bird", "birdc")
    place = _RUN / f"bird-{netns}"
    place.mkdir()
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        file, control = place / "bird.conf", place / "control"
        file.write_text(configuration)
        daemons.append(_start(netns, ["bird", "-f", "-c", str(file), "-s", str(control)]))
        support.wait_until(control.exists, 20, "bird serves")
        yield Bird(control)
    finally:
        _end(daemons)
        shutil.rmtree(place)


class Bird:
    """Bird in a namespace."""

    def __init__(self, control: Path) -> None:
        self._control = control

    def ask(self, *words: str) -> str:
        """What it answers to a command."""
        return support.run(["birdc", "-s", str(self._control), *words]).stdout


# Both ask udev whether an interface is ready. `place` is a directory that lasts while they are started again.
_OWN_RUN = """\
mount --make-rprivate /
mount --bind {place}/run /run
mkdir -p /run/udev/data
for index in /sys/class/net/*/ifindex; do echo I:1 >/run/udev/data/n$(cat $index); done
"""
_NETWORKD = """\
mkdir -p /run/systemd/network /run/systemd/netif/links /run/systemd/netif/leases /run/systemd/netif/lldp
chown -R systemd-network: /run/systemd/netif
mount --bind {place}/files /etc/systemd/network
exec env SYSTEMD_LOG_TARGET=console /lib/systemd/systemd-networkd
"""
_NETWORK_MANAGER = """\
mkdir -p /run/dbus /run/NetworkManager
mount -t tmpfs tmpfs /var/lib
mkdir -p /var/lib/NetworkManager
dbus-daemon --config-file={place}/bus.conf --nofork --nopidfile &
bus=$!
LD_LIBRARY_PATH={packages}/usr/lib/x86_64-linux-gnu {packages}/usr/sbin/NetworkManager --no-daemon \
	--config={place}/NetworkManager.conf --config-dir={place}/none --system-config-dir={place}/none \
	--intern-config=/run/NetworkManager/intern.conf --state-file=/run/NetworkManager/state &
manager=$!
trap 'kill $manager' TERM
wait $manager
wait $manager
kill $bus
wait
"""
_BUS = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
  "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type><listen>unix:path=/run/dbus/system_bus_socket</listen><auth>EXTERNAL</auth>
  <policy context="default"><allow send_destination="*"/><allow receive_sender="*"/><allow own="*"/></policy>
</busconfig>
"""
_MANAGER = """\
[main]
plugins=keyfile
dhcp=internal
dns=none
[keyfile]
path={place}/files
[device-rails]
match-device=interface-name:rail*
managed=1
[logging]
backend=stderr
"""


class ByFiles:
    """A daemon in a namespace that has a file for each interface, and a /run of its own, without udev.

    Parameters
    ----------
    netns : str
        The namespace.
    place : Path
        A directory for its files and for what it keeps while it is started again.
    """

    def __init__(self, netns: str, place: Path) -> None:
        self._netns, self._place = netns, place
        for name in ("files", "run"):
            (place / name).mkdir(mode=0o755)
        place.chmod(0o755)
        self._running: list[subprocess.Popen[bytes]] = []

    def _script(self) -> str:
        raise NotImplementedError

    def write(self, name: str, text: str) -> None:
        """Write a file of its configuration."""
        (self._place / "files" / name).write_text(text)
        (self._place / "files" / name).chmod(self.mode)

    mode = 0o644

    def start(self) -> int:
        """Start it; its process number."""
        self._running.append(_start(self._netns, ["ip", "netns", "exec", self._netns, "sh", "-c", self._script()]))
        return self._running[-1].pid

    def stop(self) -> None:
        """End it, as `systemctl stop` would."""
        _end(self._running)
        self._running.clear()


class Networkd(ByFiles):
    """systemd-networkd, without D-Bus."""

    def _script(self) -> str:
        return (_OWN_RUN + _NETWORKD).format(place=self._place)


class NetworkManager(ByFiles):
    """NetworkManager, with a bus of its own, from packages that were unpacked and not installed."""

    mode = 0o600
    packages = Path()

    def _script(self) -> str:
        (self._place / "bus.conf").write_text(_BUS)
        (self._place / "NetworkManager.conf").write_text(_MANAGER.format(place=self._place))
        return (_OWN_RUN + _NETWORK_MANAGER).format(place=self._place, packages=self.packages)

    def ask(self, *words: str) -> str:
        """What `nmcli` says to a command."""
        there = ("nsenter", "-m", "-n", "-t", str(self._running[-1].pid))
        libraries = f"LD_LIBRARY_PATH={self.packages}/usr/lib/x86_64-linux-gnu"
        return support.run([*there, "env", libraries, f"{self.packages}/usr/bin/nmcli", *words]).stdout


class Dnsmasq:
    """A DHCP server that announces routers, too.

    Parameters
    ----------
    netns : str
        The namespace.
    place : Path
        A directory for its files.
    """

    def __init__(self, netns: str, place: Path) -> None:
        self._netns, self._file, self._log = netns, place / "dnsmasq.conf", place / "dnsmasq.log"
        self._running: list[subprocess.Popen[bytes]] = []

    def serve(self, configuration: str) -> None:
        """Start it, or start it again, with more configuration than what concerns all interfaces."""
        self.stop()
        self._file.write_text(_DNSMASQ + configuration)
        words = ["dnsmasq", "--keep-in-foreground", f"--conf-file={self._file}", "--pid-file=", "--user=root"]
        self._running.append(_start(self._netns, [*words, f"--log-facility={self._log}"]))

    def stop(self) -> None:
        """End it; clients keep what they have."""
        _end(self._running)
        self._running.clear()

    def told(self, what: str, interface: str) -> int:
        """How often it has answered so (`DHCPACK`, `RTR-ADVERT`) on an interface."""
        return self._log.read_text().count(f"{what}({interface})") if self._log.exists() else 0


_DNSMASQ = """\
port=0
bind-dynamic
except-interface=lo
dhcp-authoritative
no-ping
leasefile-ro
dhcp-option=6
enable-ra
"""


class Dhclient:
    """A DHCP client for each of some interfaces, whose default routes have these metrics.

    Its script shall change neither the name of this machine nor its resolver.
    """

    def __init__(self, netns: str, place: Path, metrics: dict[str, int]) -> None:
        self._netns, self._place, self._metrics = netns, place, metrics
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start them."""
        settings, names = self._place / "dhclient.conf", self._place / "resolv.conf"
        settings.write_text("initial-delay 0;\ninitial-interval 1;\nbackoff-cutoff 1;\nselect-timeout 0;\nretry 1;\n")
        names.touch()
        for interface, metric in self._metrics.items():
            kept = f"-pf {self._place}/{interface}.pid -lf {self._place}/{interface}.leases -cf {settings}"
            client = (
                f"mount --bind {names} /etc/resolv.conf && exec dhclient -4 -d {kept} -e IF_METRIC={metric} {interface}"
            )
            self._running.append(_start(self._netns, ["unshare", "--mount", "--uts", "sh", "-c", client]))

    def stop(self) -> None:
        """End them; what they have set stays."""
        _end(self._running)
        self._running.clear()


def _start(netns: str, argv: list[str]) -> subprocess.Popen[bytes]:
    with inside(netns):
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _end(daemons: list[subprocess.Popen[bytes]]) -> None:
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


class Writes:
    """Every change of a route or a nexthop in a namespace from now on, by the netlink port of who made it.

    The kernel puts the port of the socket that asked for a change into the notice of it; changes of its own have 0.
    """

    def __init__(self, netns: str) -> None:
        self._netns = netns
        self._seen: Counter[tuple[int, Change]] = Counter()
        with inside(netns):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        for group in _GROUPS:
            self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
        self._socket.settimeout(0.05)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def __enter__(self) -> Writes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                notices = self._socket.recv(1 << 20)
            except TimeoutError:
                continue
            while notices:
                length, kind, _, _, port = _HEADER.unpack_from(notices)
                if kind in _KINDS:
                    name, head = _KINDS[kind]
                    self._seen[port, (name, _subject(notices[_HEADER.size + head : length]))] += 1
                notices = notices[(length + 3) & ~3 :]

    def by(self, *pids: int) -> Counter[Change]:
        """Changes made by these processes, of what."""
        ports = {port for pid in pids for port in ports_of(pid, self._netns)}
        found: Counter[Change] = Counter()
        for (port, change), count in list(self._seen.items()):
            if port in ports:
                found[change] += count
        return found


def _subject(attributes: bytes) -> str:
    """Where a route leads; the number of a nexthop, written as an address would be."""
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        value = attributes[_ATTRIBUTE.size : length]
        if kind == _SUBJECT and len(value) in (4, 16):
            return str(ipaddress.ip_address(value))
        attributes = attributes[(length + 3) & ~3 :]
    return ""


def ports_of(pid: int, netns: str) -> set[int]:
    """The netlink ports of a process's open sockets in a namespace."""
    inodes = support.socket_inodes(pid)
    with inside(netns):
        rows = Path("/proc/thread-self/net/netlink").read_text().splitlines()[1:]
    return {int(row.split()[2]) for row in rows if row.split()[1] == "0" and row.split()[9] in inodes}
