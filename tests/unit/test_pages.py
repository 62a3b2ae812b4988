"""The pages name what there is: each directory and page, each drop counter, and each key with its form and default."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keys
import pytest
import reference
import yaml
from support import ROOT, mentions

from pytools import config
from pytools.kernel.bpf import contract
from steering.policy.actions import KINDS
from steering.policy.base import Within
from steering.policy.conditions import SIGNALS
from steering.policy.schema import json_schema

PAGES = {file.name: file.read_text() for file in (ROOT / "docs").glob("*.md")}

PAGE = PAGES["architecture.md"]

MAP = PAGE.partition("## Directories\n```\n")[2].partition("```")[0]

COUNT_WHAT_WENT_WELL = {"recorded", "reflected", "wire_bytes", "lost_carriers", "sensed"}


def named() -> set[str]:
    """Files and directories of the map, from the root of the repository; a line starts with names and two blanks."""
    found: set[str] = set()
    top = ""
    for line in MAP.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if not line.startswith(" "):
            top = names[0] if len(names) == 1 else ""
            found.update(each.rstrip("/") for each in names)
        else:
            found.update(f"{top}{each}".rstrip("/") for each in names)
    return found


def counters() -> Iterator[str]:
    """Names of counters in `swerve self` that the sources write out in full, where they give what they lost."""
    for file in (ROOT / "pytools").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "drops":
                parts = list(ast.walk(node))
                keys = [key for part in parts if isinstance(part, ast.Dict) for key in part.keys]
                assigned = [
                    part for part in parts if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store)
                ]
                keys += [part.slice for part in assigned]
                yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))


def test_every_directory_of_sources_is_on_the_map() -> None:
    sources = [file for top in ("bpf", "pytools", "steering") for file in (ROOT / top).rglob("*.[pch]*")]
    rooms = {str(file.parent.relative_to(ROOT)) for file in sources if file.suffix in (".py", ".c", ".h")}
    linked = {room for room in rooms if any(part.is_symlink() for part in [ROOT / room, *(ROOT / room).parents])}
    inner = {room for room in rooms if room.startswith("bpf/include/")}
    assert rooms - linked - inner - named() == set()


def test_what_the_map_names_is_there() -> None:
    assert [each for each in sorted(named()) if not (ROOT / each).exists()] == []


def test_every_page_is_listed() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", PAGE.partition("## All pages")[2]))
    assert PAGES.keys() - {"architecture.md"} - listed == set()


def test_every_drop_counter_is_explained() -> None:
    told = set(re.findall(r"`(\w+)`", "".join(PAGES.values())))
    found = {*counters(), *(f"probe_{name}" for name in contract.counters("probe") if name not in COUNT_WHAT_WENT_WELL)}
    assert {"link_reads_failed", "tap_refused", "probe_forged"} < found
    missing = {
        name for name in found if not told & {name, f"bus_{name}"}
    }  # those of the agent's socket get their prefix
    assert {name for name in missing if not name.endswith("accept_paused")} == set()


def test_no_table_has_a_gap() -> None:
    """A blank line ends a table: the rows after it would be shown as text."""
    row_after_gap = re.compile(r"^\|.*\n\n(\|.*)\n(?!\|[-| :]+\|$)", re.MULTILINE)
    assert {name: found for name, text in PAGES.items() if (found := row_after_gap.findall(text))} == {}


def test_every_setting_that_a_page_names_is_a_key() -> None:
    known = {re.sub(r"\[\]", "", each.name) for each in [*keys.of_agent(), *keys.of_policy()]}
    sections = {name.partition(".")[0] for name in known if "." in name} - {"peers", "rules"}
    named = re.compile(rf"`((?:{'|'.join(sections)})\.[a-z_.]*[a-z]{{2}})`")
    assert {(page, name) for page, text in PAGES.items() for name in named.findall(text) if name not in known} == set()


def test_every_benchmark_and_proof_that_is_named_is_there() -> None:
    texts = [*PAGES.values(), *((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "Makefile"))]
    named = {each for text in texts for each in re.findall(r"make (bench|prove) NAME=(\w+)", text)}
    column = set(re.findall(r"\| `(\w+)` \|$", PAGES["overhead.md"], re.M)) - {"ps"}
    files = [ROOT / {"bench": "bench", "prove": "tests/prove"}[kind] / f"{name}.py" for kind, name in named]
    files += [ROOT / "bench" / f"{name}.py" for name in column]
    assert len(files) > 20 and [each for each in files if not each.exists()] == []


# ---- the published lists of keys ----

BOTH = {"config.txt": keys.of_agent(), "policy.txt": keys.of_policy()}


def leaves(raw: Any, prefix: str = "") -> dict[str, Any]:
    """Key -> value of a configuration, as the list names it."""
    if isinstance(raw, dict):
        return {key: value for name, each in raw.items() for key, value in leaves(each, f"{prefix}.{name}").items()}
    if isinstance(raw, list):
        return leaves(raw[0], f"{prefix}[]")
    return {prefix.removeprefix("."): raw}


@pytest.mark.parametrize("file", BOTH)
def test_the_published_list_is_that_of_the_models(file: str) -> None:
    assert (ROOT / "docs" / file).read_text() == reference.FILES[file](), "python scripts/reference.py"


@pytest.mark.parametrize("file", BOTH)
def test_every_key_has_a_meaning_and_a_form(file: str) -> None:
    assert [each.name for each in BOTH[file] if not each.meaning] == []
    assert [each.name for each in BOTH[file] if not each.form and ".signal: " not in each.name] == []


def test_the_agents_keys_are_those_of_a_file_with_their_defaults() -> None:
    shown = {each.name: each.form for each in BOTH["config.txt"] if each.form not in ("mapping", "list, required")}
    known = leaves(config.as_file(config.AgentConfig("", [config.Peer("", "")])))
    assert shown.keys() == known.keys()
    for name, form in shown.items():
        default = re.search(r"default ([^,]+)", form)
        assert yaml.safe_load(default[1] if default else "''") == known[name], name


def test_every_key_and_every_word_of_a_policy_is_listed() -> None:
    schema = json_schema()
    names = {re.sub(r": .*|\[\]", "", each.name).rpartition(".")[2] for each in BOTH["policy.txt"]}
    forms = " ".join(each.form for each in BOTH["policy.txt"])
    for part in [schema, *schema["$defs"].values()]:
        assert part.get("properties", {}).keys() - names == set()
        for field in part.get("properties", {}).values():
            assert [word for word in field.get("enum", []) if not re.search(rf"\b{word}\b", forms)] == []
    listed = {each.name for each in BOTH["policy.txt"]}
    assert {f"rules[].when.signal: {signal}" for signal in SIGNALS} <= listed
    assert {f"rules[].then.{kind}" for kind in KINDS} <= listed


def test_limits_and_signals_are_named() -> None:
    found = {(each.name, each.signals): each.form for each in BOTH["policy.txt"]}
    assert mentions(found["safety.lease", ()], "duration", "default 3s", "2s", "1m")
    assert mentions(found["safety.herd.jitter", ()], "duration", "default 0s", "at most 1m")
    assert mentions(found["safety.max_moves_per_flow.per", ()], "duration", "default 10s", "more than 0")
    assert mentions(found["rules[].then.shift.share", ()], "number", "0 to below 1", "default 0")
    assert found["rules[].when.for", ()] == "duration, default 0s"
    assert mentions(found["rules[].when.quantile", ("queueing_delay",)], "p50", "p99", "last", "default p50")
    assert str(Within(10**9)) == "at least 1s"


def test_a_comment_is_behind_its_field_or_above_it(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "class Sample:\n    first: int = 1  # behind\n    # above,\n    # in two lines\n    second: str\n\n"
        "    third: bool\n"
    )
    ((kind, fields),) = keys.classes(source)
    assert isinstance(kind, ast.ClassDef) and kind.name == "Sample"
    assert fields == {"first": ("int", "behind"), "second": ("str", "above, in two lines"), "third": ("bool", "")}
