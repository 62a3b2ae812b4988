#!/usr/bin/env python3
"""Every command that README.md and docs/ show exists: targets of make, commands of swerve with the options shown.

Commands are the lines of ```sh blocks, without a leading `$ ` and without comments. Of a `swerve` command the
sub-command is run with `--help`, and each option shown must be in that help. A block opened with ```sh run is run
as it stands, so it must be read-only. Prints what is wrong and exits with 1.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(?:sh|bash|console)(?P<how>[^\n]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"^(--?[a-zA-Z][\w-]*)")
LIMIT_S = 60


@dataclass(frozen=True)
class Shown:
    """One command as the README shows it."""

    line: int
    words: tuple[str, ...]
    run: bool


def commands(text: str) -> Iterator[Shown]:
    """Every command of the page's shell blocks; continued lines are joined."""
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start("body")) + 1
        continued = ""
        for offset, raw in enumerate(block["body"].splitlines()):
            line = continued + raw.strip().removeprefix("$ ")
            if line.endswith("\\"):
                continued = line[:-1]
                continue
            continued = ""
            for part in re.split(r"\s(?:&&|\|\||\||;)\s", line):
                words = tuple(shlex.split(part, comments=True))
                if words:
                    yield Shown(first + offset, words, block["how"].split() == ["run"])


def outcome(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run one command from the checkout, without a terminal."""
    return subprocess.run(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def command_help(operands: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The help of the longest chain of sub-commands at the start of these words, and the words of that chain."""
    chain: tuple[str, ...] = ()
    text = outcome([".venv/bin/swerve", "--help"]).stdout
    for word in operands:
        if word.startswith("-") or not re.search(
            rf"^  {re.escape(word)}\b", text.partition("Commands:")[2], re.MULTILINE
        ):
            break
        chain = (*chain, word)
        text = outcome([".venv/bin/swerve", *chain, "--help"]).stdout
    return text, chain


def complaint(shown: Shown) -> str | None:
    """What is wrong with one command; None when it is as shown."""
    program, *operands = [word for word in shown.words if word != "sudo"]
    program = Path(program).name
    if shown.run:
        done = outcome([".venv/bin/swerve" if program == "swerve" else program, *operands])
        return f"exit code {done.returncode}: {done.stderr.strip()}" if done.returncode else None
    if program == "make":
        targets = [word for word in operands if "=" not in word and not word.startswith("-")]
        done = outcome(["make", "--dry-run", *targets])
        return done.stderr.strip() if done.returncode else None
    if program != "swerve":
        return None
    text, chain = command_help(tuple(operands))
    rest = operands[len(chain) :]
    if "Commands:" in text and rest and not rest[0].startswith("-"):
        return f"swerve {' '.join([*chain, rest[0]])}: there is no such command"
    listed = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))
    for word in operands[: operands.index("--") if "--" in operands else None]:
        option = OPTION.match(word)
        if option and option[1] not in listed:
            return f"swerve {' '.join(chain)} has no option {option[1]}"
    return None


def main() -> int:
    """Look at every command of every page."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    shown = [(page.relative_to(ROOT), each) for page in pages for each in commands(page.read_text())]
    wrong = [
        f"{page}:{each.line}: {shlex.join(each.words)}: {said}" for page, each in shown if (said := complaint(each))
    ]
    print("\n".join(wrong) or f"commands: {len(shown)} on {len(pages)} pages")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
