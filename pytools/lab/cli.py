"""The `swerve lab` commands: make, look at, harm, heal and remove a fabric of network namespaces."""

from __future__ import annotations

import json
import re
from typing import Any

import click

from pytools.errors import UsageError
from pytools.lab import fabric, state
from pytools.lab.topology import DEFAULT_QUEUE_BYTES, rate_text

_name = click.option("--name", default="lab", show_default=True, help="Which lab.")
_rail = click.option("--rail", type=int, required=True, help="Number of the rail, from 1.")
_json = click.option("-j", "--json", "as_json", is_flag=True, help="One JSON object on standard output.")


@click.group()
def lab() -> None:
    """A leaf-spine fabric in network namespaces."""


@lab.command()
@_name
@click.option("--hosts", type=int, default=4, show_default=True, help="How many hosts.")
@click.option("--rails", type=int, default=2, show_default=True, help="How many rails.")
@click.option("--rate", default="100mbit", show_default=True, help="Rate of each rail port, or none.")
@click.option(
    "--queue",
    "queue_bytes",
    type=int,
    default=DEFAULT_QUEUE_BYTES,
    show_default=True,
    help="Queue of each rail port, in bytes.",
)
@click.option("--ipv6", is_flag=True, help="Configure the agents to probe over IPv6 as well.")
@_json
def up(name: str, hosts: int, rails: int, rate: str, queue_bytes: int, ipv6: bool, as_json: bool) -> None:
    """Make a lab."""
    made = fabric.Lab.up(name, hosts=hosts, rails=rails, rate=rate, queue_bytes=queue_bytes, ipv6=ipv6)
    _print(made.show(), as_json)


@lab.command()
@_name
@_rail
@click.option("--rate", help="The rate that is left, like 10mbit.")
@click.option("--queue", "queue_bytes", type=int, help="The queue that is left, in bytes.")
@click.option("--load", help="Other traffic instead: how much is sent, like 90mbit.")
@click.option("--toward", help="Only the port towards this host, like h2.")
def congest(
    name: str, rail: int, rate: str | None, queue_bytes: int | None, load: str | None, toward: str | None
) -> None:
    """Cut the rate of a rail's ports or their queues, or fill them with other traffic."""
    if rate is None and queue_bytes is None and load is None:
        raise UsageError("nothing to change", "give --rate, --queue or --load")
    host = None if toward is None else _host_number(toward)
    lab = fabric.Lab.open(name)
    if rate is not None or queue_bytes is not None:
        lab.congest(rail, rate, queue_bytes, host)
    if load is not None:
        lab.load(rail, load, host)


@lab.command()
@_name
@_rail
@click.option("--direction", help="Only packets from one host to another, like h1:h2.")
def blackhole(name: str, rail: int, direction: str | None) -> None:
    """Let a rail lose packets silently; its carrier stays up."""
    fabric.Lab.open(name).blackhole(rail, None if direction is None else _direction(direction))


@lab.command()
@_name
@click.option("--rail", type=int, help="Only this rail.")
def heal(name: str, rail: int | None) -> None:
    """Undo congest and blackhole, and end other traffic."""
    fabric.Lab.open(name).heal(rail)


@lab.command()
@_name
@_json
def show(name: str, as_json: bool) -> None:
    """The lab as the kernel has it now."""
    _print(fabric.Lab.open(name).show(), as_json)


@lab.command()
@_name
def down(name: str) -> None:
    """Remove a lab and all that is left of it, also after a crash."""
    for line in state.tear_down(name):
        click.echo(f"left alone: {line}", err=True)


def _host_number(text: str) -> int:
    match = re.fullmatch(r"h?([1-9]\d*)", text)
    if match is None:
        raise UsageError(f"{text!r} is no host", "write it like h1")
    return int(match[1])


def _direction(text: str) -> tuple[int, int]:
    source, colon, destination = text.partition(":")
    if not colon:
        raise UsageError(f"{text!r} is no direction", "write it like h1:h2")
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
    for process in shown["processes"]:
        click.echo(f"  process {process['pid']}  {process['command']}")


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
