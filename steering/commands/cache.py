"""`swerve cache`: list compiled kernel programs, export them to a file, import them on hosts without a compiler."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pytools import config as configuration
from pytools import directories
from pytools.cli_options import Asked, Options, common, filtered
from pytools.errors import CapabilityError

if TYPE_CHECKING:
    from pytools.kernel.bpf.cache_archive import Entry
    from pytools.kernel.bpf.compiler_client import Program
    from pytools.views.columns import Listing

_FILE: Final = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@click.group(epilog="Example: swerve cache list")
def cache() -> None:
    """List, export and import compiled kernel programs (docs/operating.md)."""


@cache.command("list", epilog="Example: swerve cache list --source probe --sort size")
@click.option("--source", "sources", metavar="TEXT", multiple=True, help="Select programs with TEXT in their source.")
@filtered()
@common(follows=False)
def list_(options: Options, asked: Asked, sources: Sequence[str]) -> None:
    """List the compiled programs of this user and of root, and whether this host uses them."""
    from pytools.kernel.bpf import cache as kept
    from pytools.kernel.bpf import cache_archive
    from pytools.views.filters import chosen
    from pytools.views.follow import console

    listing = _listing()
    word = None if asked.sort is None else chosen(asked.sort, listing.words(), "column to sort by")
    shelf = kept.Shelf("", *map(str, directories.compiled_dirs()))
    rows = []
    for name in shelf.names():
        body = shelf.read(name) or b""
        with contextlib.suppress(ValueError):
            entry = cache_archive.entry_of(body)
            row = _facts(name, entry) | {"bytes": len(body), "unused": _unused(name, entry)}
            if not sources or any(text.lower() in row["source"].lower() for text in sources):
                rows.append(row)
    rows = listing.ordered(rows, word)
    if options.json:
        for row in rows:
            click.echo(json.dumps(row))
    else:
        title = f"{len(rows)} programs in {' and '.join(map(str, directories.compiled_dirs()))}"
        console(options.color).print(listing.sheet(title, rows))


def _listing() -> Listing[dict[str, Any]]:
    from pytools.views.columns import Column, Listing, figure, named
    from pytools.views.tables import number

    def constants(row: dict[str, Any]) -> str:
        return " ".join(f"{key}={value}" for key, value in row["defines"].items())

    return Listing(
        (
            Column("program", lambda row: row["key"][:12]),
            figure("bytes", "size", number, lambda row: row["bytes"]),
            figure("state", "state", str, lambda row: row["unused"] or "used", order=named, left=True),
            figure("source", "source", str, lambda row: row["source"], order=named, left=True),
            Column("constants", constants, left=True),
        ),
        lambda _row: 0,
    )


@cache.command(epilog="Example: swerve cache export programs.tar --config agent.yaml")
@_FILE
@common(follows=False)
def export(options: Options, file: Path) -> int:
    """Write what an agent and a controller load to the new archive FILE; compile first what is missing.

    Includes what the agent's configuration needs, for this kernel and for kernels that can do less. Exit code 1: a
    program is left out.
    """
    from pytools.kernel.bpf import cache as kept
    from pytools.kernel.bpf import cache_archive

    names, left_out = _compiled(_wanted(options))
    shelf = kept.Shelf("", *map(str, directories.compiled_dirs()))
    entries = {}
    for name, source in names.items():
        body = shelf.read(name)
        if body is None or not cache_archive.is_entry(body):
            left_out[source] = f"it cannot be stored in {directories.compiled_dirs()[0]}"
        else:
            entries[name] = body
    if not entries:
        why = "; ".join(f"{source}: {why}" for source, why in left_out.items())
        raise CapabilityError(f"no program can be exported: {why}", "run it as root on a host with a compiler")
    size = cache_archive.write(file, entries)
    if options.json:
        objects = [_facts(name, cache_archive.entry_of(body)) for name, body in entries.items()]
        click.echo(json.dumps({"file": str(file), "bytes": size, "objects": objects, "left_out": left_out}))
    else:
        click.echo(f"{file}: {len(entries)} programs, {size / 1000:.0f} kB")
        for source, why in left_out.items():
            click.echo(f"left out: {source}: {why}")
    return 1 if left_out else 0


@cache.command("import", epilog="Example: swerve cache import programs.tar")
@_FILE
@common(follows=False)
def import_(options: Options, file: Path) -> int:
    """Import the compiled programs of archive FILE into the cache, all or none.

    The kernel runs what root imports, for the services too: import only what you exported. Exit code 4: something is
    refused.
    """
    from pytools.kernel.bpf import cache_archive

    taken = cache_archive.take(cache_archive.read(file), str(directories.compiled_dirs()[0]))
    counted = {"imported": len(taken.imported), "already_there": len(taken.already_there)}
    if options.json:
        click.echo(json.dumps(counted | {"refused": taken.refused}))
    else:
        click.echo(
            f"{counted['imported']} imported, {counted['already_there']} already there, {len(taken.refused)} refused"
        )
        for why in taken.refused.values():
            click.echo(f"refused: {why}")
    return 4 if taken.refused else 0


def _facts(name: str, entry: Entry) -> dict[str, Any]:
    made = entry.made_from
    of_program = {"source": made.program.source, "defines": made.program.defines, "machine": made.program.machine}
    return {"key": name, **of_program, "libraries": made.compiler.libraries}


def _unused(name: str, entry: Entry) -> str:
    """Why this host does not load an entry; empty when it does."""
    from pytools.kernel.bpf import cache_key
    from pytools.kernel.bpf.compiler_client import bcc_package, bpf_dir

    asked = entry.made_from.program
    program = {"source": asked.source, "defines": asked.defines, "functions": asked.functions}
    here = cache_key.inputs(program, str(bpf_dir()), bcc_package())
    if asked.machine != cache_key.machine():
        return "other machine"
    if not name.startswith(here.prefix or "-"):
        return "other sources"
    return "" if here.name in (name, "") else "other compiler"


def _wanted(options: Options) -> list[Program]:
    """What an agent of this configuration and a controller load, on this kernel and on those that can do less."""
    from pytools.sources import programs
    from pytools.sources.rdma import providers
    from steering.actuators import flow_table, ports

    file = options.config or directories.default_config(options.netns)
    there = options.config is not None or file.exists()
    config = configuration.load(file) if there else configuration.AgentConfig("", [])
    found: list[Program] = []
    for kernel in programs.running().lesser():
        found += [each for each in programs.all_of(config, kernel) if each not in found]
    return [*found, providers.program(), flow_table.PROGRAM, ports.PROGRAM]


def _compiled(wanted: Sequence[Program]) -> tuple[dict[str, str], dict[str, str]]:
    """The names of these programs in the cache with their sources, and what cannot be compiled, and why."""
    from pytools.kernel.bpf.compiler_client import Compilation

    names, failed = {}, {}
    for some in _batches(wanted, os.cpu_count() or 1):
        with Compilation(some) as compilation:
            for reply, descriptors in compilation.replies():
                for fd in descriptors:
                    os.close(fd)
                why = reply["error"] or "; ".join(f"{name}: {why}" for name, why in reply["failed"].items())
                if why:
                    failed[reply["source"]] = why
                else:
                    names[reply["entry"]] = reply["source"]
    return names, failed


def _batches(wanted: Sequence[Program], size: int) -> Iterator[Sequence[Program]]:
    """A few at a time: each needs a processor, and 230 MB."""
    for at in range(0, len(wanted), size):
        yield wanted[at : at + size]
