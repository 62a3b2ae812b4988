"""`swerve steer history`: what was done, when, by whom and why. Changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import click

from pytools import directories
from pytools.cli_options import SINCE, Asked, Options, common, filtered
from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.signals import Act, encode
from pytools.views import times
from steering.acting import acts_file, journal
from steering.cli_types import act_line, clock, weights_text
from steering.plan import title


@dataclass(frozen=True, slots=True)
class _Done:
    """Something that was done, and in which boot and network namespace: numbers that are never used twice."""

    what: journal.Entry | Act
    scope: str

    @property
    def outcome(self) -> str:
        return self.what.outcome if isinstance(self.what, Act) else self.what.kind

    @property
    def boot(self) -> str:
        return self.scope.partition("/")[0]


@click.command(epilog="Example: swerve steer history -n swerve-x-h1 --since 1h --target 10.9.0.2 -c 20")
@SINCE
@click.option("--target", default="", metavar="TEXT", help="Select targets with TEXT in their name.")
@click.option("--all", "everything", is_flag=True, help="Include earlier network namespaces of the same name.")
@filtered()
@common(without="interval")
def history(options: Options, asked: Asked, since: str | None, target: str, everything: bool) -> None:
    """Print what was done, when, by whom and why, oldest first; with --count, the last entries.

    Prints one line per act, with its outcome; a line separates earlier boots, unless --sort is given. With -j, changes
    of weights come from the journal (objects with `kind`), pins, labels, alerts and orders from the record of acts
    (objects with `type`); `scope` is the boot and the network namespace.
    """
    low_ns = 0 if since is None else times.parse(since, time.time_ns())
    folder = directories.state_dir(options.netns)
    parts = [journal.read(folder / name) for name in (f"{journal.FILE}.1", journal.FILE)]
    done = _sorted(
        [_Done(entry, entry.scope) for part in parts for entry in part.entries]
        + [_Done(act, scope) for scope, act in acts_file.read(folder)]
    )
    wanted = [each for each in done if each.what.unix_ns >= low_ns and _about(each.what, target)]
    here = _scope(options.netns)
    ours = [each for each in wanted if everything or not _of_another_namespace(each, here)]
    last = ours[-(options.count or 0) :]
    if asked.sort is not None:
        last = _by(asked.sort, last)
    for line in _lines(last, here, options.json, asked.sort is None):
        click.echo(line)
    if others := len(wanted) - len(ours):
        said = "of earlier network namespaces of this name were left out: --all shows them"
        click.echo(f"swerve steer: {others} entries {said}", err=True)
    if torn := sum(part.torn for part in parts):
        click.echo(f"swerve steer: {torn} torn lines were left out", err=True)


def _by(word: str, done: Iterable[_Done]) -> list[_Done]:
    """In the order of a column."""
    from pytools.views.columns import Order, much, named
    from pytools.views.filters import chosen

    orders: dict[str, Order[_Done]] = {
        "time": much(lambda each: each.what.unix_ns),
        "target": named(lambda each: title(each.what.target)),
        "outcome": named(lambda each: each.outcome),
        "rule": named(lambda each: each.what.under),
    }
    return orders[chosen(word, orders, "column to sort by")](done)


def _sorted(done: Iterable[_Done]) -> list[_Done]:
    """In the order of time; what does not say where it was done was done where the last one was."""
    found, last = [], ""
    for each in sorted(done, key=lambda each: each.what.unix_ns):
        last = each.scope or last
        found.append(_Done(each.what, last))
    return found


def _scope(name: str | None) -> str:
    """The boot and namespace that is called so now; only the boot where none is."""
    try:
        with netns.inside(name):
            return netns.scope()
    except SwerveError:
        return netns.scope().partition("/")[0]


def _of_another_namespace(each: _Done, here: str) -> bool:
    """Whether it was done in this boot, in a namespace that is not the one of this name any more."""
    return "/" in here and each.scope != here and each.boot == here.partition("/")[0]


def _lines(done: Iterable[_Done], here: str, as_json: bool, by_time: bool) -> Iterator[str]:
    last, parts = here, by_time and not as_json
    for each in done:
        if each.scope != last and parts:
            yield f"-- {_where(each, here)} --"
        last = each.scope
        yield _json(each) if as_json else _line(each.what)
    if last != here and "/" in here and parts:
        yield "-- nothing in this boot --"


def _where(each: _Done, here: str) -> str:
    if each.scope == here:
        return "this boot"
    if each.boot != here.partition("/")[0]:
        return "an earlier boot"
    return "an earlier network namespace of this name"


def _about(each: journal.Entry | Act, text: str) -> bool:
    return text in each.target or text in title(each.target)


def _json(each: _Done) -> str:
    if isinstance(each.what, Act):
        return json.dumps(json.loads(encode(each.what)) | {"scope": each.scope}, ensure_ascii=False)
    return json.dumps(journal.as_json(each.what) | {"scope": each.scope}, ensure_ascii=False)


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
