"""Why the steps of a real job are slow: TCP in lock step over two rails, with one cause after the other planted."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import job_kit
import pytest
import support
from job_kit import LockStep, Verdicts

from pytools.lab import Lab

pytestmark = pytest.mark.beside

LAB = {"queue_bytes": 1_000_000}
EVEN = {"rail1": 8, "rail2": 8}


def names(kind: str, **fields: Any) -> Any:
    """Whether the first cause is of a kind, and has these fields; waits and steal by other load are left out."""

    def met(why: dict[str, Any]) -> bool:
        causes = [each for each in why["causes"] if each["kind"] != "host" or "throttled" in each["reason"]]
        return bool(causes) and {name: causes[0][name] for name in ("kind", *fields)} == {"kind": kind, **fields}

    return met


@contextlib.contextmanager
def job(lab: Lab, placed: dict[str, int], ras: bool = False) -> Any:
    near = lab.hosts[0]
    for each in lab.hosts:  # the second answers probes
        lab.start(each, [*support.SWERVE, "agent", "-n", each.netns])
    with contextlib.closing(LockStep(lab, job_kit.ports_that_hash_to(lab, placed), ras)) as ranks:
        support.wait_until(lambda: support.swerve("jobs", "-n", near.netns, "-j", check=False).stdout, 60, "a job")
        with contextlib.closing(Verdicts(near.netns)) as verdicts:
            yield ranks, verdicts


@pytest.mark.deadline(240)
def test_a_congested_rail_and_a_throttled_rank_are_told_apart(lab: Lab) -> None:
    with job(lab, EVEN) as (ranks, verdicts):
        why = verdicts.until(
            lambda why: why["step"] and not {"rhythm", "network", "host"} & why["missing"].keys(), 60, "all is measured"
        )
        assert why["step"]["source"] == "tcp" and why["step"]["steps"] == 16
        assert "other ranks" in why["missing"]["ranks"] or "plugin" in why["missing"]["ranks"]
        assert why["verdict"] != "healthy"  # without the plugin stragglers are not seen

        lab.congest(2, "10mbit", toward=2)
        why = verdicts.until(names("network", interface="rail2"), 60, "the congested rail is named")
        assert why["causes"][0]["low"] >= 0.05 and why["causes"][0]["path"]["destination"] == "h2"
        lab.heal(2)
        verdicts.until(lambda why: all(each["kind"] != "network" for each in why["causes"]), 60, "it is well again")

        with job_kit.quota("rank1", ranks.pids[1]) as limit:
            limit(0.05)
            why = verdicts.until(names("host", rank=1), 60, "the throttled rank is named")
            (cause,) = [each for each in why["causes"] if each["rank"] == 1]
            assert "was throttled for" in cause["reason"] and cause["low"] > 0.2
            limit(None)


def test_connections_that_hash_badly_are_called_uneven(lab: Lab) -> None:
    with job(lab, {"rail1": 12, "rail2": 4}) as (_, verdicts):
        why = verdicts.until(names("imbalance", interface="rail1"), 60, "the busy rail is named")
        assert "12 of 16 connections" in why["reason"] or any("12 of 16" in each["reason"] for each in why["causes"])


@pytest.mark.deadline(240)
def test_a_rail_that_loses_packets_is_named_and_never_the_other(lab: Lab) -> None:
    with job(lab, EVEN) as (_, verdicts):
        for share in (0.05, 0.2):
            lab.lose(2, share, toward=2)
            verdicts.until(names("network", interface="rail2"), 150, "the rail that loses packets is named")
            first = [[each for each in why["causes"] if each["kind"] == "network"][:1] for why in verdicts.next(5)]
            assert {cause["interface"] for causes in first for cause in causes} <= {"rail2"}
            lab.heal(2)


def test_what_answers_as_ras_does_not_change_the_verdict(lab: Lab) -> None:
    """It answers with junk, and then hangs."""
    program = "import socket\nheld, server = [], socket.create_server(('127.0.0.1', 28028))\nwhile True:\n"
    answering = "len(held) > 3 or held[-1][0].sendall(bytes(range(128, 256)) * 64)"
    lab.start(lab.hosts[0], [sys.executable, "-c", f"{program} held.append(server.accept()); {answering}"])
    with job(lab, EVEN, ras=True) as (ranks, verdicts):
        for state in ("invalid", "unresponsive"):
            support.wait_until(lambda s=state: any(each["ras"] == s for each in verdicts.heard), 60, f"RAS is {state}")
        with job_kit.quota("ras", ranks.pids[1]) as limit:
            limit(0.05)
            verdicts.until(names("host", rank=1), 60, "the throttled rank is named")
            limit(None)
        assert {each["ras"] for each in verdicts.heard} <= {"pending", "invalid", "unresponsive"}
        assert not verdicts.heard[-1]["lagging"]
