"""The `swerve lab` commands: make, look at, harm, heal and remove a fabric of network namespaces."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import click

from pytools.errors import UsageError
from pytools.lab import clocks, fabric, state, timekeeping
from pytools.lab.topology import DEFAULT_QUEUE_BYTES, KINDS, rate_text


def _host_number(text: str) -> int:
    match = re.fullmatch(r"h?([1-9]\d*)", text)
    if match is None:
        raise UsageError(f"{text!r} is not a host", "write it like h1")
    return int(match[1])


def _host(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    return None if text is None else _host_number(text)


_toward = click.option("--toward", callback=_host, help="Apply to packets towards this host only, like h2.")
_name = click.option("--name", default="lab", show_default=True, help="Use the lab of this name.")
_rail = click.option("--rail", type=int, required=True, help="Act on this rail, counted from 1.")
_inner = click.option("--inner", type=int, help="Apply to inner path N of the rail, from 1, instead of its ports.")
_json = click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(epilog="Example: swerve lab up --hosts 4 --rails 2")
def lab() -> None:
    """Run a leaf-spine fabric in network namespaces."""


def _on_rail(epilog: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command that acts on a rail of a lab."""
    return lambda function: lab.command(epilog=epilog)(_name(_rail(function)))


@lab.command(epilog="Example: swerve lab up --hosts 4 --rails 2")
@_name
@click.option("--hosts", type=int, default=4, show_default=True, help="Create this many hosts.")
@click.option("--rails", type=int, default=2, show_default=True, help="Create this many rails.")
@click.option("--rate", default="100mbit", show_default=True, help="Shape each rail port to this rate, or none.")
@click.option(
    "--queue",
    "queue_bytes",
    type=int,
    default=DEFAULT_QUEUE_BYTES,
    show_default=True,
    help="Limit the queue of each rail port, in bytes.",
)
@click.option("--inner", type=int, default=0, help="Give each rail this many inner paths; it hashes flows over them.")
@click.option("--over", type=click.Choice(KINDS), help="Build the rails from devices of this kind.")
@click.option("--ipv6", is_flag=True, help="Configure the agents to probe over IPv6 as well.")
@click.option("--clocks", "seed", type=int, help="Give each host its own clock, drawn from this seed.")
@click.option("--share", "shared", multiple=True, help="Give these hosts one oscillator, like h1,h2 (repeatable).")
@click.option("--bus", is_flag=True, help="Connect the agents by the bus; implied by --clocks.")
@_json
def up(
    name: str,
    hosts: int,
    rails: int,
    rate: str,
    queue_bytes: int,
    inner: int,
    over: str | None,
    ipv6: bool,
    seed: int | None,
    shared: tuple[str, ...],
    bus: bool,
    as_json: bool,
) -> None:
    """Create a lab."""
    if shared and seed is None:
        raise UsageError("without --clocks all hosts share one clock", "give --clocks as well")
    groups = [[_host_number(host) for host in group.split(",")] for group in shared]
    drawn = None if seed is None else clocks.draw(hosts, seed, time.monotonic_ns(), groups)
    made = fabric.Lab.up(
        *(name, hosts, rails, rate), queue_bytes=queue_bytes, ipv6=ipv6, clocks=drawn, bus=bus, inner=inner, over=over
    )
    _print(made.show(), as_json)


@_on_rail("Example: swerve lab congest --rail 1 --rate 10mbit")
@click.option("--rate", help="Limit the rate, like 10mbit.")
@click.option("--queue", "queue_bytes", type=int, help="Limit the queue, in bytes.")
@click.option("--load", help="Send competing traffic at this rate instead, like 90mbit.")
@click.option("--toward", callback=_host, help="Apply to the port towards this host only, like h2.")
@_inner
def congest(
    name: str,
    rail: int,
    rate: str | None,
    queue_bytes: int | None,
    load: str | None,
    toward: int | None,
    inner: int | None,
) -> None:
    """Cut the rate of a rail's ports or their queues, or fill them with other traffic."""
    if rate is None and queue_bytes is None and load is None:
        raise UsageError("nothing to change", "give --rate, --queue or --load")
    lab = fabric.Lab.open(name)
    if rate is not None or queue_bytes is not None:
        lab.congest(rail, rate, queue_bytes, toward, inner)
    if load is not None:
        lab.load(rail, load, toward, inner)


@_on_rail("Example: swerve lab blackhole --rail 1")
@click.option("--direction", help="Drop packets from one host to another only, like h1:h2.")
@_inner
def blackhole(name: str, rail: int, direction: str | None, inner: int | None) -> None:
    """Drop all packets in a rail silently; the carrier stays up."""
    fabric.Lab.open(name).blackhole(rail, None if direction is None else direction_of(direction), inner)


@_on_rail("Example: swerve lab delay --rail 1 --direction h1:h2 --us 500")
@click.option("--direction", required=True, help="Delay packets from one host to another, like h1:h2.")
@click.option("--us", "extra_us", type=float, required=True, help="Delay by this many microseconds.")
def delay(name: str, rail: int, direction: str, extra_us: float) -> None:
    """Delay packets from one host to another over a rail, in this direction only."""
    source, destination = direction_of(direction)
    fabric.Lab.open(name).delay(rail, source, destination, extra_us)


@_on_rail("Example: swerve lab bursts --rail 1 --share 0.4")
@click.option("--share", type=float, required=True, help="Fill this mean share of each port's rate, like 0.4.")
@click.option("--seed", type=int, default=1, show_default=True, help="Draw the bursts from this seed.")
def bursts(name: str, rail: int, share: float, seed: int) -> None:
    """Fill a share of a rail's ports with bursty TCP between all hosts."""
    fabric.Lab.open(name).bursts(rail, share, seed)


@_on_rail("Example: swerve lab mark --rail 1 --every 10")
@click.option("--every", type=int, default=1, show_default=True, help="Mark every Nth ECN-capable packet.")
@_toward
def mark(name: str, rail: int, every: int, toward: int | None) -> None:
    """Mark ECN-capable packets in a rail as congested (CE)."""
    fabric.Lab.open(name).mark(rail, every, toward)


@_on_rail("Example: swerve lab mtu --rail 1 --bytes 1400")
@click.option("--bytes", "mtu_bytes", type=int, required=True, help="Forward IP packets up to this size, like 1400.")
@click.option("--silent", is_flag=True, help="Drop longer packets without an ICMP message.")
@_toward
def mtu(name: str, rail: int, mtu_bytes: int, silent: bool, toward: int | None) -> None:
    """Limit the size of packets that a rail forwards."""
    fabric.Lab.open(name).mtu(rail, mtu_bytes, silent, toward)


@_on_rail("Example: swerve lab lose --rail 1 --share 0.2")
@click.option("--share", type=float, required=True, help="Drop this share of packets, like 0.2.")
@_toward
def lose(name: str, rail: int, share: float, toward: int | None) -> None:
    """Drop packets in a rail at random."""
    fabric.Lab.open(name).lose(rail, share, toward)


@_on_rail("Example: swerve lab cut --rail 1 --host h1 --carrier")
@click.option("--host", callback=_host, help="Cut the cable to this host only, like h1.")
@click.option("--carrier", is_flag=True, help="Take the carrier down at both ends as well.")
def cut(name: str, rail: int, host: int | None, carrier: bool) -> None:
    """Cut the cables between a rail and its hosts."""
    fabric.Lab.open(name).cut(rail, host, carrier)


@lab.command("kill-host", epilog="Example: swerve lab kill-host --host h2")
@_name
@click.option("--host", callback=_host, required=True, help="Kill this host, like h2.")
def kill_host(name: str, host: int) -> None:
    """Kill a host: end its processes and cut its cables."""
    for line in fabric.Lab.open(name).kill_host(host):
        click.echo(f"killed: {line}")


@lab.command(epilog="Example: swerve lab heal --rail 1")
@_name
@click.option("--rail", type=int, help="Heal this rail only.")
@click.option("--routes", is_flag=True, help="Restore the routes that the kernel removed with the carrier.")
def heal(name: str, rail: int | None, routes: bool) -> None:
    """Undo congest, blackhole, cut, delay, mark, mtu and lose, and end competing traffic."""
    fabric.Lab.open(name).heal(rail, routes)


@lab.command(epilog="Example: swerve lab clock --host h3 --step 10ms")
@_name
@click.option("--host", callback=_host, help="With --step, step the clock of this host, like h3.")
@click.option("--step", "by", help="Step the clock by this much in half a second, like 10ms or -250us.")
@_json
def clock(name: str, host: int | None, by: str | None, as_json: bool) -> None:
    """Show the true offset of every host's clock against h1's, or step one."""
    if (host is None) != (by is None):
        raise UsageError("a step needs a host and a size", "give --host and --step, or neither")
    lab = fabric.Lab.open(name)
    if host is None or by is None:
        _print_clocks(lab.clocks(), as_json)
        return
    step_ns = timekeeping.parse_shift(by)
    at_ns = lab.step_clock(host, step_ns)
    if as_json:
        click.echo(json.dumps({"host": f"h{host}", "step_ns": step_ns, "at_ns": at_ns}))
    else:
        click.echo(f"h{host} is stepped by {step_ns} ns when CLOCK_MONOTONIC is {at_ns} ns")


@lab.command(epilog="Example: swerve lab show -j")
@_name
@_json
def show(name: str, as_json: bool) -> None:
    """Show the lab's current state in the kernel."""
    _print(fabric.Lab.open(name).show(), as_json)


@lab.command(epilog="Example: swerve lab down")
@_name
def down(name: str) -> None:
    """Remove a lab, also after a crash."""
    for line in state.tear_down(name):
        click.echo(f"left alone: {line}", err=True)


def direction_of(text: str) -> tuple[int, int]:
    """The two hosts of `h1:h2`."""
    source, colon, destination = text.partition(":")
    if not colon:
        raise UsageError(f"{text!r} is not a direction", "write it like h1:h2")
    return _host_number(source), _host_number(destination)


def _print(shown: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(shown))
        return
    click.echo(f"lab {shown['name']}: {rate_text(shown['rate_bit_s'])} a port, queue {shown['queue_bytes']} bytes")
    for host in shown["hosts"]:
        ways = ", ".join(f"{each['name']} {each['address']}" for each in host["interfaces"])
        click.echo(f"  {host['name']}  {host['netns']}  {host['service']}  {host['service6']}  ({ways})")
    for rail in shown["rails"]:
        click.echo(f"  {rail['name']}  {rail['netns']}")
        for port in rail["ports"]:
            click.echo(f"      {_port_line(port)}")
        for way in rail.get("inner", ()):
            click.echo(f"      {way['name']}  {way['netns']}")
            for port in way["ports"]:
                click.echo(f"          {_port_line(port)}")
        for what, packets in rail["faults"].items():
            click.echo(f"      {packets} packets {what.replace('_', ' ')}")
    for process in shown["processes"]:
        click.echo(f"  process {process['pid']}  {process['command']}")


def _print_clocks(shown: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(shown))
        return
    click.echo(f"lab {shown['name']}: against the clock of {shown['reference']}")
    for each in shown["clocks"]:
        steps = len(each["steps"])
        words = "" if not steps else ", 1 step" if steps == 1 else f", {steps} steps"
        click.echo(f"  {each['host']}  {each['offset_ns']:+,} ns, {each['drift_ppb']:+,.0f} ns/s{words}")


def _port_line(port: dict[str, Any]) -> str:
    words = [f"to {port['interface']}", rate_text(port["rate_bit_s"])]
    if port["rate_bit_s"] is not None:
        words.append(f"{port['waiting_bytes']} of {port['queue_bytes']} bytes waiting")
    words.append(f"{port['dropped_packets']} packets dropped")
    if not port["carrier"]:
        words.append("no carrier")
    if port["loses_packets_to"]:
        words.append(f"loses what {port['interface']} sends to {', '.join(port['loses_packets_to'])}")
    return ", ".join(words)
