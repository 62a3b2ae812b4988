"""One lab, as its users see it: brought up, harmed, healed, looked at, taken down.

Blocking, single thread; a lab of 4 hosts and 2 rails takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

from pytools.errors import SwerveError, UsageError
from pytools.kernel.netlink.routing import Netlink
from pytools.lab import building, bursts, faults, filters, processes, state, timekeeping, view
from pytools.lab.clocks import VirtualClock
from pytools.lab.topology import Host, Rail, Spec, check_shape, host_of, parse_rate, rail_of


class Lab:
    """One lab, whether made by this process or found. As a context manager it is taken down at the end."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec  # how it was made
        self.hosts, self.rails = spec.topology  # host 1 is `hosts[0]`, rail 1 is `rails[0]`
        self._started: list[subprocess.Popen[str]] = []

    @property
    def name(self) -> str:
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
        clocks: int | Sequence[VirtualClock] | None = None,
        bus: bool = False,
        inner: int = 0,
        over: str | None = None,
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
        clocks : int or sequence of VirtualClock, optional
            A clock for each host, or a seed to draw them from; hosts share the machine's clock unless given.
        bus : bool
            Let the agents talk to each other; with clocks they do in any case.
        inner : int
            Ways inside each rail, of which it chooses one for each flow; 0 for none.
        over : str, optional
            What a rail's interfaces are, one of `topology.KINDS`; plain cables unless given.

        Raises
        ------
        UsageError
            If the name is taken or a size does not fit.
        CapabilityError
            If a privilege or a kernel feature is missing.
        """
        queue = {} if queue_bytes is None else {"queue_bytes": queue_bytes}
        spec = Spec(name, hosts, rails, parse_rate(rate), ipv6=ipv6, inner=inner, over=over, **queue)
        building.require_privileges()
        given = timekeeping.wanted(hosts, clocks)
        state.reserve(spec)
        lab = cls(spec)
        try:
            building.build(spec, given, state.key_file(name) if bus or given is not None else None)
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
        return cls(state.recall(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
            words = f"{host.name}: {' '.join(argv)}: exit code {process.returncode}"
            raise SwerveError(f"{words}: {errors.strip()}" if errors.strip() else words)
        return output

    def _start(
        self, rail: int, place: Host | Rail, module: str, *words: str, output: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """Start a program of the lab; `heal` of the rail ends it."""
        argv = [sys.executable, "-P", "-m", f"pytools.lab.{module}", *words]
        return self.start(place, argv, {processes.LOAD_MARK: str(rail)}, output, output)

    # ---- faults ----

    def congest(
        self,
        rail: int,
        rate: str | None = None,
        queue_bytes: int | None = None,
        toward: int | None = None,
        inner: int | None = None,
    ) -> None:
        """Cut the rate of a rail's ports, or their queues, in place.

        Parameters
        ----------
        rate : str, optional
            The new rate; as the lab was made unless given.
        queue_bytes : int, optional
            The new queue; as the lab was made unless given. A queue shorter than a burst loses packets.
        toward : int, optional
            Only the port towards this host.
        inner : int, optional
            The ports of this way inside the rail instead of the rail's own.
        """
        rate_bit_s = self.spec.rate_bit_s if rate is None else parse_rate(rate)
        queue = self.spec.queue_bytes if queue_bytes is None else queue_bytes
        faults.congest(self.spec, rail, rate_bit_s, queue, toward, inner)

    def load(self, rail: int, rate: str, toward: int | None = None, inner: int | None = None) -> None:
        """Congest a rail with other traffic: UDP to a host's address on that rail, from the host after it.

        Parameters
        ----------
        rate : str
            How much is sent towards each host, like 90mbit.
        toward : int, optional
            Only towards this host.
        inner : int, optional
            By a flow that takes this way inside the rail.
        """
        rate_bit_s = parse_rate(rate)
        if rate_bit_s is None:
            raise UsageError("a load needs a rate", "give one, like 90mbit; `heal` ends it")
        check_shape(rate_bit_s, self.spec.queue_bytes)
        target = rail_of(self.spec, rail)
        for sink in self.hosts if toward is None else (host_of(self.spec, toward),):
            source = self.hosts[sink.number % len(self.hosts)]
            address = sink.interfaces[target.number - 1].address
            words = [source.netns, sink.netns, address, str(rate_bit_s)]
            if inner is not None:
                way = rail_of(self.spec, rail, inner)
                words += [way.netns, way.ports[sink.number - 1].name]
            self._start(rail, source, "load", *words)

    def bursts(self, rail: int, share: float, seed: int = 1) -> None:
        """Fill a share of every port of a rail with bursty TCP between all hosts; `heal` ends it.

        Parameters
        ----------
        share : float
            Of each port's rate, on average: 0.4 is 40 %. `sent_bytes` tells what came of it.
        seed : int
            The same seed sends the same bursts at the same times.
        """
        target = rail_of(self.spec, rail)
        bursts.check_share(share)
        if self.spec.rate_bit_s is None:
            raise UsageError("an unshaped port has no rate to take a share of", "create the lab with --rate")
        words = self.name, str(rail), str(share), str(seed)
        processes.wait_until_ready(self._start(rail, target, "bursts", *words, output=subprocess.PIPE))

    def blackhole(self, rail: int, direction: tuple[int, int] | None = None, inner: int | None = None) -> None:
        """Let a rail lose packets without a word: carrier stays up, gateways still answer.

        Parameters
        ----------
        direction : (int, int), optional
            Only packets from this host to that one; all forwarded packets unless given.
        inner : int, optional
            Only what takes this way inside the rail.
        """
        faults.blackhole(self.spec, rail, direction, inner)

    def delay(self, rail: int, source: int, destination: int, extra_us: float, spread_us: float = 0.0) -> None:
        """Let packets from one host to another take longer over one rail, and not the way back.

        Each packet passes a process, so this is for probes and light traffic. It lowers the time to live by one more.

        Parameters
        ----------
        source, destination : int
            From which host to which.
        extra_us : float
            By how much.
        spread_us : float
            By how much more at most, another time for each packet.
        """
        device, extra_ns = faults.longer_way(self.spec, rail, source, destination, extra_us)
        words = device, str(extra_ns), str(round(spread_us * 1000))
        line = self._start(rail, self.rails[rail - 1], "delay_line", *words, output=subprocess.PIPE)
        processes.wait_until_ready(line)
        faults.divert(self.spec, rail, source, destination, device)

    def mark(self, rail: int, every: int = 1, toward: int | None = None) -> None:
        """Let a rail mark every n-th packet that can be marked (ECN) as having met congestion; `counts` tells how many.

        Parameters
        ----------
        every : int
            1 marks them all. Each CPU counts for itself; a buffer that is to become several packets is marked whole.
        toward : int, optional
            Only packets towards this host.
        """
        faults.mark(self.spec, rail, every, toward)

    def mtu(self, rail: int, mtu_bytes: int, silent: bool = False, toward: int | None = None) -> None:
        """Let a rail forward no IP packet longer than this.

        Parameters
        ----------
        mtu_bytes : int
            The longest packet that passes.
        silent : bool
            Lose longer ones without a word (`counts` tells how many) instead of telling the sender by ICMP.
        toward : int, optional
            Only packets towards this host.
        """
        faults.narrow(self.spec, rail, mtu_bytes, silent, toward)

    def lose(self, rail: int, share: float, toward: int | None = None) -> None:
        """Let a rail lose packets at random; `counts` tells how many.

        Parameters
        ----------
        share : float
            Of all packets that its ports send, each independently: 0.2 is 20 %. Both ways of a round trip lose.
        toward : int, optional
            Only packets towards this host.
        """
        faults.lose(self.spec, rail, share, toward)

    def cut(self, rail: int, host: int | None = None, carrier: bool = False) -> None:
        """Let the cables between a rail and its hosts carry nothing, for the rail's own packets neither.

        Parameters
        ----------
        host : int, optional
            Only the cable to this host.
        carrier : bool
            Both ends lose their carrier, and with it the host its nexthops; else they notice nothing.
        """
        faults.cut(self.spec, rail, host, carrier)

    def kill_host(self, host: int) -> list[str]:
        """Let a host die: its processes are killed, its cables cut silently. Returns the processes.

        `heal` gives the cables back; its processes stay dead.
        """
        dead = host_of(self.spec, host)
        killed = processes.kill_inside(self.name, dead.netns)  # first: cables are cut one by one, which others notice
        for process in self._started:
            process.poll()
        for rail in self.rails:
            faults.cut(self.spec, rail.number, host, carrier=False)
        return killed

    def counts(self, rail: int) -> dict[str, int]:
        """Packets that a rail's faults touched: `able` to be marked, `marked`, `too_long`, `lost`, `lost_at_random`.

        `lost` counts those on a cut cable.
        """
        return filters.counts(rail_of(self.spec, rail))

    def heal(self, rail: int | None = None, routes: bool = False) -> None:
        """Give a rail (all of them unless given) its cables, rate, queue and MTU back; end its load, marks and loss.

        Parameters
        ----------
        routes : bool
            Give hosts their nexthops, groups and routes back as well, as `up` had made them: the kernel drops what
            loses its carrier, and nobody puts it back but a routing daemon or this.
        """
        for target in self.rails if rail is None else (rail_of(self.spec, rail),):
            processes.end(self.name, load=target.number)
            faults.heal(self.spec, target)
        for host in self.hosts if routes else ():
            with Netlink(host.netns) as netlink:
                building.route_host(netlink, host, self.hosts, self.spec.over)

    # ---- clocks ----

    def clock(self, host: Host | int) -> VirtualClock:
        """The clock of a host: what its stamps are made with.

        Raises
        ------
        UsageError
            If the lab was made without clocks.
        """
        return timekeeping.clock_of(self._host(host))

    def step_clock(self, host: Host | int, step_ns: int) -> int:
        """Step a host's clock within a second or so; returns the exact instant, of CLOCK_MONOTONIC."""
        return timekeeping.step(self._host(host), step_ns)

    def clocks(self) -> dict[str, Any]:
        """How every host's clock runs against the first one's now, in truth, as JSON-ready values."""
        return {"name": self.name, **timekeeping.show(self.hosts)}

    # ---- state ----

    def show(self) -> dict[str, Any]:
        """The lab as it is now, read from the kernel, as JSON-ready values."""
        return view.lab(self.spec)

    def sent_bytes(self) -> dict[tuple[int, int], int]:
        """What each shaped port has sent so far, in bytes of Ethernet frames, by numbers of rail and host."""
        return view.sent_bytes(self.rails)

    def down(self) -> list[str]:
        """Take the lab down; a second time does nothing. Returns what stayed and why, normally nothing."""
        stayed = state.tear_down(self.name)
        for process in self._started:
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._started.clear()
        return stayed

    def _host(self, host: Host | int) -> Host:
        return host_of(self.spec, host) if isinstance(host, int) else host
