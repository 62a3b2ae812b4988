"""The `demo` command: options in, progress to standard error, table or JSON to standard output."""

from __future__ import annotations

import os
import sys
import time

import click
import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pytools.signals import Act
from steering.demo.phases import Phase
from steering.demo.run import Result, Script, lab_name, play, progress

_REASONS = 4


@click.command(epilog="Example: swerve demo --json > demo.json")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--no-steer", is_flag=True, help="Do not steer: show the congested rail only.")
@click.option(
    "--steady",
    type=click.IntRange(5, 600),
    default=Script.steady_s,
    show_default=True,
    metavar="SECONDS",
    help="Keep the rail congested for SECONDS while controllers act.",
)
@click.option("--no-color", is_flag=True, help="Disable colour (also: environment NO_COLOR).")
def demo(as_json: bool, no_steer: bool, steady: int, no_color: bool) -> None:
    """Run a demo on a lab of 4 hosts and 2 rails: congest a rail and steer traffic away from it.

    Sends real packets, in its own network namespaces only, takes about two minutes, and removes everything afterwards.
    """
    script = Script(steer=not no_steer, steady_s=steady, name=lab_name())
    result = play(script, progress(sys.stderr, time.monotonic()))
    if as_json:
        click.echo(msgspec.json.encode(result))
        return
    console = Console(no_color=no_color or bool(os.environ.get("NO_COLOR")), width=None if sys.stdout.isatty() else 130)
    console.print(rendered(result))


def rendered(result: Result) -> Group:
    """The table of all phases, what steering took, and why it acted."""
    table = Table(title="swerve demo", title_justify="left", caption=_caption(result), caption_justify="left")
    for heading in ("phase", "goodput", "of offered", "OWD p99", "resets", "packets rail1 / rail2"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase in result.phases:
        table.add_row(
            phase.name,
            f"{phase.goodput_bit_s / 1e6:.0f} Mbit/s",
            f"{phase.goodput_share:.0%}",
            _milliseconds(phase.owd_p99_ns),
            str(phase.resets),
            " / ".join(f"{count:,}" for count in phase.packets.values()),
        )
    return Group(table, *[Text(line) for phase in result.phases for line in _steered(phase)])


def _caption(result: Result) -> str:
    return (
        f"{result.hosts} hosts, {result.rails} rails of {result.rate}; congested: rail 1 at {result.congested_rate}. "
        "OWD p99 counts probes on paths that carry traffic."
    )


def _milliseconds(value_ns: float | None) -> str:
    return "lost" if value_ns is None else f"{value_ns / 1e6:.2f} ms"


def _steered(phase: Phase) -> list[str]:
    lines = [f"{phase.name}: {problem}" for problem in phase.broken]
    if phase.reversals is None:
        return lines
    lines.append(
        f"{phase.name}: seen {_after(phase.detect_ms)} after the onset, acted {_after(phase.act_ms)} later "
        f"(slowest of all hosts), reversals: {phase.reversals}"
    )
    applied = [act for act in phase.acts if act.outcome == "applied"]
    lines += [f"  {_explained(act)}" for act in applied[:_REASONS]]
    if len(applied) > _REASONS:
        lines.append(f"  ... and {len(applied) - _REASONS} more acts; --json has all")
    return lines


def _after(value_ms: float | None) -> str:
    return "never" if value_ms is None else f"{value_ms:.0f} ms"


def _explained(act: Act) -> str:
    def weights(of: dict[str, int]) -> str:
        return ", ".join(f"{nexthop}: {weight}" for nexthop, weight in of.items())

    return f"{act.host} {act.what}: {weights(act.before)} -> {weights(act.after)} because {act.because} ({act.under})"
