"""`swerve steer history`: what was done, when, by whom and why. Changes nothing."""

from __future__ import annotations

import json
import time

import click

from pytools import places
from pytools.cli_options import SINCE, Options, common
from pytools.signals import Act, encode
from pytools.views import times
from steering.acting import acts_file, journal
from steering.plan import title
from steering.words import act_line, clock, weights_text


@click.command(epilog="Example: swerve steer history -n swerve-x-h1 --since 1h --target 10.9.0.2 -c 20")
@SINCE
@click.option("--target", default="", metavar="TEXT", help="Only about targets with this in their name.")
@common()
def history(options: Options, since: str | None, target: str) -> None:
    """What was done, when, by whom and why, oldest first; with --count only the last entries.

    One line an act, with its outcome. With -j changes of weights come from the journal (objects with `kind`), pins,
    labels, alerts and orders from the record of acts (objects with `type`).
    """
    if options.interval_s is not None:
        raise click.UsageError("history ends where the journal ends: it has no interval")
    low_ns = 0 if since is None else times.parse(since, time.time_ns())
    folder = places.state_dir(options.netns)
    parts = [journal.read(folder / name) for name in (f"{journal.FILE}.1", journal.FILE)]
    entries = [entry for part in parts for entry in part.entries]
    both: list[journal.Entry | Act] = [*entries, *acts_file.read(folder)]
    both.sort(key=lambda each: each.unix_ns)
    wanted = [each for each in both if each.unix_ns >= low_ns and _about(each, target)]
    for each in wanted[-(options.count or 0) :]:
        click.echo(_json(each) if options.json else _line(each))
    if torn := sum(part.torn for part in parts):
        click.echo(f"swerve steer: {torn} torn lines were left out", err=True)


def _about(each: journal.Entry | Act, text: str) -> bool:
    return text in each.target or text in title(each.target)


def _json(each: journal.Entry | Act) -> str:
    if isinstance(each, Act):
        return encode(each).decode()
    return json.dumps(journal.as_json(each), ensure_ascii=False)


def _line(each: journal.Entry | Act) -> str:
    if isinstance(each, Act):
        return act_line(each)
    if each.kind in ("confirmed", "expired"):
        return f"{clock(each.unix_ns)} {each.kind} by {each.by}: {each.act_id}: {each.because}"
    before, after = (weights_text(each.group.named(weights)) for weights in (each.before, each.after))
    under = f" [{each.under}]" if each.under else ""
    return (
        f"{clock(each.unix_ns)} {each.kind} by {each.by}: {title(each.target)}: {before} → {after} "
        f"because {each.because}{under}"
    )
