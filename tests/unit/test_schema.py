"""What other programs may rely on: the published schema, and lines of earlier programs that must stay readable."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import samples
from click.testing import CliRunner
from support import ROOT

from pytools import cli
from pytools.ipc.wire import TAGS, TYPES
from pytools.schema import json_schema
from pytools.signals import SCHEMA_VERSION, decode, encode

PUBLISHED = ROOT / "docs" / "signals.schema.json"
RECORDED = sorted((Path(__file__).parent / "recorded").glob("signals-*.jsonl"))
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def lines(version: int) -> list[bytes]:
    return (Path(__file__).parent / "recorded" / f"signals-{version}.jsonl").read_bytes().splitlines()


def test_the_published_schema_is_that_of_the_types() -> None:
    assert json.loads(PUBLISHED.read_text()) == json_schema(), "swerve schema > docs/signals.schema.json"
    done = CliRunner().invoke(cli.schema)
    assert done.exit_code == 0 and done.output == PUBLISHED.read_text()


def test_it_is_a_schema_and_every_signal_is_of_it() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    told = samples.one_of_each()
    assert {TAGS[type(each)] for each in told} == TYPES
    for each in told:
        VALIDATOR.validate(json.loads(encode(each)))


@pytest.mark.parametrize(
    "wrong", [{"type": "path_delay"}, {"type": "no_such"}, {}, [], {"type": "act", "host": "h1", "at_ns": "soon"}]
)
def test_what_is_no_signal_is_not_of_it(wrong: object) -> None:
    assert not VALIDATOR.is_valid(wrong)


def test_every_record_says_whose_it_is_and_when() -> None:
    for part in json_schema()["$defs"].values():
        if "type" in part["properties"]:
            assert {"host", "at_ns", "unix_ns", "schema"} <= part["properties"].keys()
            assert {"host", "at_ns", "unix_ns"} <= set(part["required"])


UNIT = re.compile(r"_(ns|us|ppb|bps|mbps|bytes|segments|packets|share|mhz|w|c|ppb_per_s)$|_per_")
# Counts of what the name says, numbers that are names, and ratios.
WITHOUT = """
    aggregator agreeing ambiguous answered_run behind busy capacity carrier_changes cnp_received cnp_sent
    communicator_rank completed confidence connections created differs_at drops duplicates ecc_corrected
    ecc_corrected_total ecc_uncorrected ecc_uncorrected_total ecn_marked errors evicted failures fast flows
    gid_index gpu group_id high joined limit link local_port local_rank loss_bound lost low memory_busy messages
    missed missed_extra neighbours netns nexthop_id operations out_of_sequence outlier_edges outstanding overlimits
    overtaken packets pairs_kept pairs_rejected pcie_generation pcie_generation_max pcie_replays pcie_width
    pcie_width_max pid pings port ports_in_all posted priority processes qp_number queue_id queue_pairs rank
    ras_ranks readings received received_drops received_errors receiver_not_ready receives_completed receives_posted
    recent_loss refused_posts remote_port remote_qp_number reordered requeues resets_received resets_refused
    resets_sent runs sampled samples samples_above schema segments_in segments_out sent sent_drops sent_errors share
    sick_hop size slowdown slowness steps syn tail_probe tap_processes timeout timeouts uid unknown unmatched
    untracked way ways weight weight_actual weight_wanted windows zero_windows
"""


def test_numbers_have_their_units_in_their_names() -> None:
    """A new field without one has to be entered above: is it a count, a name, or a ratio?"""
    found = {
        field
        for part in json_schema()["$defs"].values()
        for field, what in part["properties"].items()
        if {"integer", "number"} & {each.get("type") for each in what.get("anyOf", [what])}
    }
    assert {field for field in found if not UNIT.search(field)} == set(WITHOUT.split())


# ---- from one version to the next ----


def test_there_are_lines_of_this_version() -> None:
    """Written once, by the first program of a version, and never again: they stand for all that is stored out there."""
    assert RECORDED and {msgspec.json.decode(line)["type"] for line in lines(SCHEMA_VERSION)} <= TYPES


@pytest.mark.parametrize("line", lines(SCHEMA_VERSION), ids=lambda line: msgspec.json.decode(line)["type"])
def test_what_was_stored_is_read_with_nothing_gone_or_renamed(line: bytes) -> None:
    stored, read = json.loads(line), json.loads(encode(decode(line)))
    assert holds(read, stored), "a field went, or changed: that takes another schema version"


def holds(whole: Any, part: Any) -> bool:
    """Whether all that is in `part` is in `whole`, which may have more."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and holds(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(holds, whole, part))
    return bool(whole == part) and type(whole) is type(part)


def test_fields_of_later_programs_are_passed_over() -> None:
    for each in samples.one_of_each():
        later = json.loads(encode(each)) | {"comes_later_ns": 5}
        assert decode(json.dumps(later)) == each


def test_a_later_version_may_mean_something_else_and_is_no_signal() -> None:
    for each in samples.one_of_each():
        stored = json.loads(encode(each))
        with pytest.raises(msgspec.ValidationError, match="schema"):
            decode(json.dumps(stored | {"schema": SCHEMA_VERSION + 1}))
        assert decode(json.dumps(stored | {"schema": SCHEMA_VERSION - 1})), "recordings outlive an upgrade"


def test_types_of_later_programs_are_no_signals_and_nothing_worse() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(b'{"type":"comes_later","host":"h1","at_ns":1,"unix_ns":1,"schema":3}')
