"""What travels with the package says what the code does: the sample, the pages, the lists, the man pages."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from email.message import Message
from typing import Any

import click
import keys
import manpages
import msgspec
import pytest
import roff
import vendored
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import ROOT

from pytools import config, errors
from steering.cli import root

SAMPLE = ROOT / "examples" / "agent.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED_BY_HAND = {"host", "peers", "peers[].name", "peers[].address"}  # there is no default for these


def flattened(raw: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        if name == "peers":
            yield from flattened(value[0], "peers[].")
        elif isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


KEYS = dict(flattened(config.as_file(config.AgentConfig("", [config.Peer("", "")]))))


def test_the_sample_is_a_configuration() -> None:
    loaded = config.load(SAMPLE)
    assert msgspec.structs.replace(loaded, host="", peers=[]) == config.AgentConfig("", [])


def test_the_sample_has_every_key_with_its_default() -> None:
    shown = dict(flattened(yaml.safe_load(SAMPLE.read_text())))
    assert shown.keys() == KEYS.keys()
    wrong = {key: value for key, value in shown.items() if key not in NAMED_BY_HAND and value != KEYS[key]}
    assert not wrong, f"these are no defaults: {wrong}"


def test_every_section_of_the_sample_is_explained() -> None:
    lines = SAMPLE.read_text().splitlines()
    bare = [line for line in lines if re.match(r"\w+:", line) and "#" not in line]
    assert len(lines) > 50 and not bare


# Lists


def test_the_changelog_tells_the_version() -> None:
    made = manpages.release(manpages.CHANGELOG.read_text())
    assert made.version == PROJECT["version"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", made.date)


@pytest.mark.parametrize("text", ["", "swerve 1.0", "swerve (1.0) x; urgency=low\n\n  * a\n"])
def test_a_changelog_without_version_or_date_is_said(text: str) -> None:
    with pytest.raises(SystemExit, match="changelog"):
        manpages.release(text)


LOCKS = sorted((ROOT / "packaging").glob("vendored.*.txt"))


def test_every_dependency_is_in_the_package_or_in_debian() -> None:
    assert LOCKS
    for lock in LOCKS:
        versions = vendored.locked(lock.read_text())
        for requirement in vendored.wanted():
            name = canonicalize_name(requirement.name)
            if name in vendored.FROM_DEBIAN:
                assert name not in versions
                continue
            assert name in versions, f"{lock.name} lacks {name}: scripts/vendored.py"
            assert requirement.specifier.contains(versions[name]), f"{name} {versions[name]}: scripts/vendored.py"
        assert all("--hash=sha256:" in line for line in lock.read_text().splitlines() if "==" in line)


class Installed(importlib.metadata.Distribution):
    """A distribution that is not there."""

    def __init__(self, name: str, *requires: str) -> None:
        self._facts = Message()
        self._facts["Name"], self._facts["Version"] = name, "1.0"
        for each in requires:
            self._facts["Requires-Dist"] = each

    @property
    def metadata(self) -> Any:
        return self._facts

    def read_text(self, filename: str) -> str | None:
        return str(self._facts) if filename == "METADATA" else None

    def locate_file(self, path: object) -> Any:
        raise NotImplementedError


def test_what_an_extra_needs_counts_where_the_extra_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {
        "a": Installed("a", "b[fast]>=1", 'w; sys_platform == "win32"'),
        "b": Installed("b", 'c; extra == "fast"', 'd; extra == "slow"', "a"),
        "c": Installed("c"),
    }
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: there[name])
    assert sorted(vendored.closure([Requirement("a")])) == ["a", "b", "c"]


# Man pages

PAGES = {page.path.as_posix(): page.text for page in manpages.pages()}
REQUESTS = {".TH", ".SH", ".SS", ".PP", ".TP", ".IP", ".RS", ".RE", ".EX", ".EE", ".br"}
PARTS = ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS", "FILES", "ENVIRONMENT", "SEE ALSO")


def contexts() -> list[click.Context]:
    return list(manpages.contexts(root, "swerve"))


@pytest.mark.parametrize("context", contexts(), ids=lambda context: context.command_path)
def test_every_command_has_a_page_with_all_its_options(context: click.Context) -> None:
    text = PAGES[f"man1/{context.command_path.replace(' ', '-')}.1"]
    found = re.findall(r'^\.SH "(.+)"$', text, re.MULTILINE)
    assert [part for part in found if part != "COMMANDS"] == list(PARTS)
    for parameter in context.command.get_params(context):
        for option in parameter.opts if isinstance(parameter, click.Option) else ():
            assert roff.escaped(option) in text
    for line in manpages.examples(context.command):
        assert f"\n{roff.escaped(line)}\n" in text


def test_the_two_files_have_pages_with_every_key() -> None:
    for page, described in (("agent", keys.of_agent()), ("policy", keys.of_policy())):
        for key in described:
            assert f".TP\n{roff.bold(key.name)}\n" in PAGES[f"man5/swerve-{page}.5"]


@pytest.mark.parametrize("path", sorted(PAGES))
def test_nothing_in_a_page_is_taken_for_a_request(path: str) -> None:
    lines = PAGES[path].splitlines()
    assert {line.split()[0] for line in lines if line[:1] in (".", "'")} <= REQUESTS
    assert all(lines) and lines[0].startswith(".TH ") and lines[2:3] != [""]
    assert lines.count(".EX") == lines.count(".EE") and lines.count(".RS 4") == lines.count(".RE")


def test_pages_come_out_alike_each_time() -> None:
    assert {page.path.as_posix(): page.text for page in manpages.pages()} == PAGES


def test_exit_codes_are_those_of_the_errors() -> None:
    told = dict(manpages.exits())
    assert told["4"] == (errors.RefusedError.__doc__ or "").splitlines()[0].replace(" (exit code 4).", "")
    assert sorted(map(int, told)) == [0, 1, 2, 3, 4, 5, 130]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (".SH x", [".PP", r"\&.SH x"]),
        ("'tis", [".PP", r"\(aqtis"]),
        ("a\\b `--c` -d", [".PP", r"a\eb \fB\-\-c\fR \-d"]),
        ("**b** and [l](l.md)", [".PP", r"\fBb\fR and \fIl\fR"]),
        ("- one\n- two", [r".IP \(bu 2", "one", r".IP \(bu 2", "two"]),
        ("1. one\n2. two", [".IP 1. 4", "one", ".IP 2. 4", "two"]),
        ("# t\n\n## p q\n\n### r", ['.SH "p q"', '.SS "r"']),
        ("```\n.x\n  y\n```", [".PP", ".RS 4", ".EX", r"\&.x", "  y", ".EE", ".RE"]),
        (
            "| key | default | meaning |\n|---|---|---|\n| `a` | 1 | is |\n| b | | |",
            [".TP", r"\fBa\fR", r"\fIdefault:\fR 1", ".br", r"\fImeaning:\fR is", ".TP", r"\fBb\fR", r"\&"],
        ),
    ],
)
def test_markdown_becomes_roff(text: str, expected: list[str]) -> None:
    assert roff.markdown(text) == expected


@pytest.mark.parametrize("text", ["> quoted", "![picture](x.svg)", "---"])
def test_markdown_that_is_not_known_is_not_left_out(text: str) -> None:
    with pytest.raises(ValueError, match="no roff is known"):
        roff.markdown(text)
