"""`swerve steer history`: what was done, when, by whom and why. Changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

import click

from pytools import places
from pytools.cli_options import SINCE, Options, common
from pytools.signals import Act, encode
from pytools.views import times
from steering.acting import acts_file, journal
from steering.plan import title
from steering.words import act_line, clock, weights_text


@click.command(epilog="Example: swerve steer history -n swerve-x-h1 --since 1h --target nexthop_group:102 -c 20")
@SINCE
@click.option("--target", default="", metavar="TEXT", help="Only about targets with this in their name.")
@common()
def history(options: Options, since: str | None, target: str) -> None:
    """What was done, when, by whom and why, oldest first; with --count only the last entries.

    One line an act, with its outcome; an intent is shown where no outcome was noted. With -j every entry: changes of
    weights come from the journal (objects with `kind`), pins, labels, alerts and orders from the record of acts
    (objects with `type`).
    """
    if options.interval_s is not None:
        raise click.UsageError("history ends where the journal ends: it has no interval")
    low_ns = 0 if since is None else times.parse(since, time.time_ns())
    folder = places.state_dir(options.netns)
    parts = [journal.read(folder / name) for name in (f"{journal.FILE}.1", journal.FILE)]
    entries = [entry for part in parts for entry in part.entries]
    both: list[journal.Entry | Act] = [*(entries if options.json else told(entries)), *acts_file.read(folder)]
    both.sort(key=lambda each: each.unix_ns)
    wanted = [each for each in both if each.unix_ns >= low_ns and _about(each, target)]
    for each in wanted[-(options.count or 0) :]:
        click.echo(_json(each) if options.json else _line(each))
    if torn := sum(part.torn for part in parts):
        click.echo(f"swerve steer: {torn} torn lines were left out", err=True)


def told(entries: Sequence[journal.Entry]) -> Iterator[journal.Entry]:
    """Entries for people, in their order: without the intents whose outcome was noted."""
    noted: set[str] = set()  # acts whose outcome comes after the entry that is looked at
    found = []
    for entry in reversed(entries):
        if entry.kind in ("applied", "failed"):
            noted.add(entry.act_id)
        elif entry.kind == "intent" and entry.act_id in noted:
            noted.remove(entry.act_id)
            continue
        found.append(entry)
    return reversed(found)


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
    moved = f"{weights_text(dict(each.before))} → {weights_text(dict(each.after))}"
    under = f" [{each.under}]" if each.under else ""
    open_end = "; no outcome was noted" if each.kind == "intent" else ""
    return (
        f"{clock(each.unix_ns)} {each.kind} by {each.by}: {title(each.target)}: {moved} "
        f"because {each.because}{under}{open_end}"
    )
