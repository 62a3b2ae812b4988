"""Builds a lab, makes faults in it, and takes it down so that nothing stays.

Everything a lab consists of is found again by names and marks; the file kept beside it only says how it was
meant to be. Blocking, single thread; a lab of 4 hosts and 2 rails takes a fraction of a second.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from pytools import places
from pytools.errors import SwerveError, UsageError
from pytools.kernel.netlink import Netlink, Rule
from pytools.lab import building, namespaces, processes, wiring
from pytools.lab.topology import (
    Host,
    Rail,
    Spec,
    check_name,
    check_shape,
    lab_of_namespace,
    namespace_pattern,
    parse_rate,
)

# Two priorities: the kernel takes a rule without a destination for the same as one that only adds a destination.
_ONE_WAY_PRIORITY, _RAIL_PRIORITY = 100, 101
_FAULT_PROTOCOL = 201


class Lab:
    """One lab, whether made by this process or found. As a context manager it is taken down at the end.

    Attributes
    ----------
    spec : Spec
        How it was made.
    hosts, rails : tuple
        Host 1 is `hosts[0]`, rail 1 is `rails[0]`.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.hosts, self.rails = spec.topology
        self._started: list[subprocess.Popen[str]] = []

    @property
    def name(self) -> str:
        """The lab's name."""
        return self.spec.name

    @classmethod
    def up(
        cls,
        name: str = "lab",
        hosts: int = 4,
        rails: int = 2,
        rate: str = "100mbit",
        queue_bytes: int | None = None,
        ipv6: bool = False,
    ) -> Self:
        """Make a lab.

        Parameters
        ----------
        name : str
            Must not be in use.
        hosts, rails : int
            How large.
        rate : str
            Rate of each rail port towards its host; `none` leaves them unshaped.
        queue_bytes : int, optional
            Queue of each port in bytes.
        ipv6 : bool
            Let the agents' configurations name IPv6 peers as well.

        Raises
        ------
        UsageError
            If the name is taken or a size does not fit.
        CapabilityError
            If a privilege or a kernel feature is missing.
        """
        queue = {} if queue_bytes is None else {"queue_bytes": queue_bytes}
        spec = Spec(name=name, hosts=hosts, rails=rails, rate_bit_s=parse_rate(rate), ipv6=ipv6, **queue)
        building.require_privileges()
        _reserve(spec)
        lab = cls(spec)
        try:
            building.build(spec)
        except BaseException:
            lab.down()
            raise
        return lab

    @classmethod
    def open(cls, name: str) -> Self:
        """A lab that is up.

        Raises
        ------
        UsageError
            If there is none of this name, or what it was made with is lost.
        """
        check_name(name)
        try:
            raw = msgspec.json.decode(_state_file(name).read_bytes())
            return cls(Spec(**raw))
        except FileNotFoundError:
            if _namespaces_of(name):
                raise UsageError(
                    f"lab {name} is there, but not how it was made", f"`swerve lab down --name {name}` removes it"
                ) from None
            known = ", ".join(labs()) or "none is up"
            raise UsageError(f"there is no lab {name} ({known})", f"`swerve lab up --name {name}` makes it") from None
        except (msgspec.DecodeError, TypeError) as error:
            raise UsageError(
                f"{_state_file(name)}: {error}", f"`swerve lab down --name {name}` removes the lab"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # ---- processes ----

    def start(
        self,
        host: Host | Rail,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = subprocess.DEVNULL,
        stderr: int | IO[Any] | None = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Start a process inside a host's (or rail's) namespace; `down` ends it and all it started."""
        process = processes.start(self.name, host.netns, argv, env, stdout, stderr)
        self._started.append(process)
        return process

    def run(self, host: Host | Rail, argv: Sequence[str], timeout_s: float = 60) -> str:
        """Run a command inside a host's namespace to its end; what it wrote to standard output.

        Raises
        ------
        SwerveError
            If it fails or takes too long.
        """
        process = self.start(host, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise SwerveError(f"{host.name}: {' '.join(argv)}: still running after {timeout_s:g} s") from None
        finally:
            self._started.remove(process)
        if process.returncode != 0:
            raise SwerveError(f"{host.name}: {' '.join(argv)}: exit code {process.returncode}: {errors.strip()}")
        return output

    # ---- faults ----

    def congest(
        self,
        rail: int,
        rate: str | None = None,
        queue_bytes: int | None = None,
        toward: int | None = None,
    ) -> None:
        """Cut the rate of a rail's ports, or their queues, in place.

        Parameters
        ----------
        rail : int
            Which rail.
        rate : str, optional
            The new rate; as the lab was made unless given.
        queue_bytes : int, optional
            The new queue; as the lab was made unless given. A queue shorter than a burst loses packets.
        toward : int, optional
            Only the port towards this host.
        """
        rate_bit_s = self.spec.rate_bit_s if rate is None else parse_rate(rate)
        queue = self.spec.queue_bytes if queue_bytes is None else queue_bytes
        check_shape(rate_bit_s, queue)
        if rate_bit_s is None:
            raise UsageError("an unshaped port has no queue to congest", "give a rate, like 10mbit")
        target = self._rail(rail)
        wanted = None if toward is None else self._host(toward).number
        with Netlink(target.netns) as netlink:
            for port in target.ports:
                if wanted in (None, port.host):
                    wiring.shape(netlink, port.index, rate_bit_s, queue)

    def load(self, rail: int, rate: str, toward: int | None = None) -> None:
        """Congest a rail with other traffic: UDP to a host's address on that rail, from the host after it.

        Parameters
        ----------
        rail : int
            Which rail.
        rate : str
            How much is sent towards each host, like 90mbit.
        toward : int, optional
            Only towards this host.
        """
        rate_bit_s = parse_rate(rate)
        if rate_bit_s is None:
            raise UsageError("a load needs a rate", "give one, like 90mbit; `heal` ends it")
        check_shape(rate_bit_s, self.spec.queue_bytes)
        target = self._rail(rail)
        for sink in self.hosts if toward is None else (self._host(toward),):
            source = self.hosts[sink.number % len(self.hosts)]
            address = sink.interfaces[target.number - 1].address
            words = [source.netns, sink.netns, address, str(rate_bit_s)]
            mark = {processes.LOAD_MARK: str(rail)}
            self.start(source, [sys.executable, "-m", "pytools.lab.load", *words], env=mark)

    def blackhole(self, rail: int, direction: tuple[int, int] | None = None) -> None:
        """Let a rail lose packets without a word: carrier stays up, gateways still answer.

        Parameters
        ----------
        rail : int
            Which rail.
        direction : (int, int), optional
            Only packets from this host to that one; all forwarded packets unless given.
        """
        target = self._rail(rail)
        with Netlink(target.netns) as netlink:
            present = set(netlink.rules(4) + netlink.rules(6))
            for rule in self._losing(rail, direction):
                if rule not in present:
                    netlink.add_rule(rule)

    def heal(self, rail: int | None = None) -> None:
        """Give a rail (all of them unless given) its rate, queue and packets back, and end its load."""
        for target in self.rails if rail is None else (self._rail(rail),):
            processes.end(self.name, load=target.number)
            with Netlink(target.netns) as netlink:
                for rule in _faults(netlink):
                    netlink.del_rule(rule)
                for port in target.ports:
                    if self.spec.rate_bit_s is None:
                        wiring.unshape(netlink, port.index)
                    else:
                        wiring.shape(netlink, port.index, self.spec.rate_bit_s, self.spec.queue_bytes)

    def _losing(self, rail: int, direction: tuple[int, int] | None) -> list[Rule]:
        """The rules behind a blackhole."""
        if direction is None:
            ports = self._rail(rail).ports
            return [_blackhole(4, port.name, None) for port in ports] + [
                _blackhole(6, port.name, None) for port in ports
            ]
        source, destination = self._host(direction[0]), self._host(direction[1])
        if source is destination:
            raise UsageError(f"direction {source.name}:{source.name} goes nowhere", "name two hosts, like h1:h2")
        interface = destination.interfaces[rail - 1]
        return [
            _blackhole(4, source.name, f"{destination.service}/32"),
            _blackhole(4, source.name, f"{interface.address}/32"),
            _blackhole(6, source.name, f"{destination.service6}/128"),
            _blackhole(6, source.name, f"{interface.address6}/128"),
        ]

    def _rail(self, number: int) -> Rail:
        if not 1 <= number <= len(self.rails):
            raise UsageError(f"lab {self.name} has no rail {number}", f"rails are 1 to {len(self.rails)}")
        return self.rails[number - 1]

    def _host(self, number: int) -> Host:
        if not 1 <= number <= len(self.hosts):
            raise UsageError(f"lab {self.name} has no host h{number}", f"hosts are h1 to h{len(self.hosts)}")
        return self.hosts[number - 1]

    # ---- state ----

    def show(self) -> dict[str, Any]:
        """The lab as it is now, read from the kernel, as JSON-ready values."""
        return {
            "name": self.name,
            "rate_bit_s": self.spec.rate_bit_s,
            "queue_bytes": self.spec.queue_bytes,
            "hosts": [_host_shown(host) for host in self.hosts],
            "rails": [self._rail_shown(rail) for rail in self.rails],
            "processes": [{"pid": pid, "command": line} for pid, line in sorted(processes.marked(self.name).items())],
        }

    def _rail_shown(self, rail: Rail) -> dict[str, Any]:
        with Netlink(rail.netns) as netlink:
            carriers = {link.index: link.carrier for link in netlink.links()}
            shaped = wiring.shapes(netlink)
            losing = _faults(netlink)
        ports = []
        for port in rail.ports:
            shape = shaped.get(port.index)
            ports.append(
                {
                    "interface": port.name,
                    "carrier": carriers[port.index],
                    "rate_bit_s": shape.rate_bit_s if shape else None,
                    "queue_bytes": shape.queue_bytes if shape else None,
                    "waiting_bytes": shape.waiting_bytes if shape else 0,
                    "dropped_packets": shape.dropped_packets if shape else 0,
                    "loses_packets_to": sorted(
                        {rule.destination or "everywhere" for rule in losing if rule.iif == port.name}
                    ),
                }
            )
        return {"name": rail.name, "netns": rail.netns, "ports": ports}

    def down(self) -> list[str]:
        """Take the lab down; a second time does nothing. Returns what stayed and why, normally nothing."""
        stayed = tear_down(self.name)
        for process in self._started:
            process.wait()
        self._started.clear()
        return stayed


def labs() -> list[str]:
    """Names of all labs that are up, or of which something is left."""
    found = {lab_of_namespace(netns) for netns in namespaces.names()} - {None}
    directory = _state_file("x").parent
    found |= {place.stem for place in directory.glob("*.json")}
    return sorted(name for name in found if name)


def tear_down(name: str) -> list[str]:
    """Remove everything that a lab of this name left, also when how it was made is not known.

    Returns
    -------
    list of str
        Processes that the lab did not start and that keep a namespace alive: left alone.
    """
    check_name(name)
    processes.end(name)
    ours = _namespaces_of(name)
    foreign = processes.within(ours)
    for netns in ours:
        namespaces.delete(netns)
    pattern = namespace_pattern(name)
    for base in (places.runtime_dir(None).parent, places.state_dir(None).parent):
        for place in base.glob(f"swerve-{name}-*"):
            if pattern.fullmatch(place.name):
                shutil.rmtree(place, ignore_errors=True)
    _state_file(name).unlink(missing_ok=True)
    return [f"process {pid} ({line}) was not started by the lab" for pid, line in sorted(foreign.items())]


def _namespaces_of(name: str) -> list[str]:
    pattern = namespace_pattern(name)
    return [netns for netns in namespaces.names() if pattern.fullmatch(netns)]


def _state_file(name: str) -> Any:
    return places.runtime_dir(None).parent / "labs" / f"{name}.json"


def _reserve(spec: Spec) -> None:
    """Take the name: from here on `down` knows that there is something to remove."""
    place = _state_file(spec.name)
    taken = UsageError(
        f"a lab {spec.name} exists already",
        f"use another --name, or remove it with `swerve lab down --name {spec.name}`",
    )
    if _namespaces_of(spec.name):
        raise taken
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fields = {name: getattr(spec, name) for name in building.SPEC_FIELDS}
    try:
        with place.open("xb") as file:
            file.write(msgspec.json.encode(fields))
    except FileExistsError:
        raise taken from None


def _blackhole(family: Any, iif: str, destination: str | None) -> Rule:
    return Rule(
        priority=_RAIL_PRIORITY if destination is None else _ONE_WAY_PRIORITY,
        family=family,
        action="blackhole",
        iif=iif,
        destination=destination,
        protocol=_FAULT_PROTOCOL,
    )


def _faults(netlink: Netlink) -> list[Rule]:
    """The rules that make a rail lose packets."""
    found = netlink.rules(4) + netlink.rules(6)
    return [rule for rule in found if rule.action == "blackhole" and rule.protocol == _FAULT_PROTOCOL]


def _host_shown(host: Host) -> dict[str, Any]:
    return {
        "name": host.name,
        "netns": host.netns,
        "service": host.service,
        "service6": host.service6,
        "interfaces": [
            {"name": each.name, "rail": each.rail, "address": each.address, "gateway": each.gateway}
            for each in host.interfaces
        ],
    }
