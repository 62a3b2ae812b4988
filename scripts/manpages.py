#!/usr/bin/env python3
"""Man pages: section 1 from the commands themselves, section 5 from the pages about the two files, and their keys.

    python scripts/manpages.py DIRECTORY

writes man1/ and man5/ there. The same sources give the same bytes: version and date are those of packaging/changelog.
"""

from __future__ import annotations

import email.utils
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import keys
import roff

from pytools import directories, errors
from steering.cli import root

ROOT: Final = Path(__file__).resolve().parent.parent
CHANGELOG: Final = ROOT / "packaging" / "changelog"

# Section 5: name, the page that becomes it, what it is, its keys.
FILES: Final = (
    ("swerve-agent", "config.md", "configuration of swerve's agent (agent.yaml)", keys.of_agent),
    ("swerve-policy", "policy.md", "what swerve may move, when, and how it comes back (policy.yaml)", keys.of_policy),
)
_EXITS: Final = (errors.SwerveError, errors.UsageError, errors.PolicyError, errors.RefusedError, errors.CapabilityError)
_PLACES: Final = (
    *(
        (f"./{name}, ~/.config/swerve/{name}, /etc/swerve/{name}", f"{what}: the first that is there, unless {how}")
        for name, what, how in (
            (directories.CONFIG, "configuration of the agent", "`--config` names another"),
            (directories.POLICY, "policy of `swerve steer run`", "`--policy` names another"),
        )
    ),
    ("/run/swerve/INSTANCE", "sockets; the instance is the network namespace's name, or host"),
    ("/var/lib/swerve/INSTANCE", "the journal of what was changed"),
    ("/var/cache/swerve", "compiled kernel programs; may go at any time where they can be compiled again"),
    ("/usr/share/doc/swerve", "examples, and in docs/ the pages that help and errors name"),
)
_ENVIRONMENT: Final = (
    ("NO_COLOR", "no colour, if it is set to anything"),
    ("XDG_CONFIG_HOME", "where the user's own files are (~/.config)"),
    ("SWERVE_RUNTIME_DIR", "in place of /run/swerve"),
    ("SWERVE_STATE_DIR", "in place of /var/lib/swerve"),
    ("SWERVE_CACHE_DIR", "in place of /var/cache/swerve"),
)


@dataclass(frozen=True)
class Release:
    """What the newest entry of the changelog says."""

    version: str
    date: str  # of the day, as 2026-11-22
    epoch_s: int


@dataclass(frozen=True)
class Page:
    """One man page."""

    name: str
    section: int
    text: str

    @property
    def path(self) -> Path:
        """Where it goes below a `man` directory."""
        return Path(f"man{self.section}") / f"{self.name}.{self.section}"


def release(changelog: str) -> Release:
    """The newest entry of a Debian changelog."""
    first = re.match(r"swerve \(([^)]+)\) ", changelog)
    signed = re.search(r"^ -- .*?>  (.+)$", changelog, re.MULTILINE)
    if first is None or signed is None:
        raise SystemExit("packaging/changelog: its first entry has no version or no date")
    at = email.utils.parsedate_to_datetime(signed[1])
    return Release(first[1], at.date().isoformat(), int(at.timestamp()))


def contexts(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[click.Context]:
    """A command and all below it, each in a context; those that are imported when used are imported."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield context
    if isinstance(context.command, click.Group):
        for each in sorted(context.command.list_commands(context)):
            below = context.command.get_command(context, each)
            assert below is not None
            yield from contexts(below, each, context)


def first_sentence(text: str) -> str:
    """What a command does, in one line."""
    return re.split(r"(?<=[^.]\.)\s|\n\s*\n", text.strip())[0].removesuffix(".").replace("\n", " ")


def examples(command: click.Command) -> list[str]:
    """The command lines that its help shows."""
    return re.findall(r"^\s*Examples?: *(.+)$", command.epilog or "", re.MULTILINE)


def command_page(context: click.Context, made: Release) -> Page:
    """The page of one command."""
    command, path = context.command, context.command_path
    name, text = path.replace(" ", "-"), command.help or ""
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        roff.heading(name, 1, made.date, f"swerve {made.version}"),
        *(roff.part("name"), rf"{roff.escaped(name)} \- {roff.escaped(first_sentence(text))}"),
        *(roff.part("synopsis"), f"{roff.bold(path)} {roff.escaped(usage)}"),
        *(roff.part("description"), *roff.paragraphs(text)),
    ]
    records = [each.get_help_record(context) for each in command.get_params(context)]
    lines += [roff.part("options"), *roff.listed(record for record in records if record is not None)]
    below = []
    if isinstance(command, click.Group):
        below = [command.get_command(context, each) for each in sorted(command.list_commands(context))]
        told = [(each.name or "", each.get_short_help_str(200)) for each in below if each is not None]
        lines += [roff.part("commands"), *roff.listed(told)]
    if shown := examples(command):
        lines += [roff.part("examples"), *roff.example("\n".join(shown))]
    lines += [roff.part("exit status"), *roff.listed(exits())]
    lines += [roff.part("files"), *roff.listed(_PLACES), roff.part("environment"), *roff.listed(_ENVIRONMENT)]
    others = [f"{name}-{each.name}(1)" for each in below if each is not None]
    above = [f"{context.parent.command_path.replace(' ', '-')}(1)"] if context.parent else []
    described = [f"{name}(5)" for name, *_ in FILES]
    lines += [roff.part("see also"), roff.escaped(", ".join([*above, *others, *described]))]
    return Page(name, 1, "\n".join(lines) + "\n")


def exits() -> list[tuple[str, str]]:
    """Exit codes, and what each says: of the errors themselves."""
    told = {each.exit_code: (each.__doc__ or "").splitlines()[0] for each in _EXITS}
    said = {code: re.sub(r" \(exit code \d\)", "", text).rstrip(".") for code, text in told.items()}
    return [(str(code), text) for code, text in sorted({0: "Done", **said, 130: "Interrupted"}.items())]


def file_page(name: str, source: str, summary: str, made: Release, described: Sequence[keys.Key]) -> Page:
    """The page of one kind of file."""
    body = roff.markdown((ROOT / "docs" / source).read_text())
    lines = [
        roff.heading(name, 5, made.date, f"swerve {made.version}"),
        *(roff.part("name"), rf"{roff.escaped(name)} \- {roff.escaped(summary)}"),
        *(roff.part("description"), *body),
        *(roff.part("keys"), *roff.listed((each.name, each.text) for each in described)),
        *(roff.part("see also"), roff.escaped("swerve(1), " + ", ".join(f"{each}(5)" for each, *_ in FILES))),
    ]
    return Page(name, 5, "\n".join(lines) + "\n")


def pages() -> Iterator[Page]:
    """All of them."""
    made = release(CHANGELOG.read_text())
    for context in contexts(root, "swerve"):
        yield command_page(context, made)
    for name, source, summary, described in FILES:
        yield file_page(name, source, summary, made, described())


def main() -> int:
    """Write them."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    for page in pages():
        place = Path(sys.argv[1]) / page.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(page.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
