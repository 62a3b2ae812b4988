"""Holds by `swerve steer run` with real agents, where packets cannot wait: what is said of it, and what is left alone.

Where the kernel has fq they do: tests/vm/guest_hold.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import steering_kit as kit
import support
from steering_kit import controlled

from pytools import directories
from pytools.ipc.client import Client
from pytools.signals import Act, HoldState

pytestmark = pytest.mark.beside

LAB = {"rails": 1}


@pytest.fixture
def lab(measured_lab):
    return measured_lab


@pytest.fixture
def heard(lab) -> Iterator[Client]:
    """What the agent of the first host publishes of holds."""
    with Client(directories.agent_socket(lab.hosts[0].netns), frozenset({"act", "hold_state"})) as client:
        yield client


@contextlib.contextmanager
def controller(lab, tmp_path, qdisc: str, *options: str):
    file = kit.policy_file(tmp_path, kit.hold_policy(f"qdisc: {qdisc}"))
    with controlled(kit.Host(lab.hosts[0].netns), file, *options) as running:
        yield running


def told(heard: Client, of: type, seconds: float = 60.0):
    """The next signal of this kind that the controller publishes."""
    for each in heard.within(seconds * support.slow_factor()):
        if isinstance(each, of):
            return each
    raise AssertionError(f"no {of.__name__} was heard of")


@pytest.mark.parametrize(
    ("chosen", "qdisc", "words"),
    [
        (False, "keep", ("noqueue", "policy", "`qdisc: fq`")),
        (True, "fq", ("pfifo", "somebody chose", "fq")),
        (True, "keep", ("pfifo", "somebody chose", "fq")),
    ],
    ids=["default", "chosen", "chosen-keep"],
)
def test_where_packets_cannot_wait_it_says_so_and_changes_nothing(lab, heard, tmp_path, chosen, qdisc, words) -> None:
    near = lab.hosts[0].netns
    if chosen:
        support.run(["tc", "-n", near, "qdisc", "replace", "dev", "rail1", "root", "handle", "5:", "pfifo"])
    before = kit.queue_of(near)
    assert before == ("pfifo" if chosen else "noqueue")
    with controller(lab, tmp_path, qdisc, "--apply") as running:
        act, state = told(heard, Act), told(heard, HoldState)
        assert (act.actuator, act.outcome, act.under) == ("hold", "failed", "short-queues")
        assert support.mentions(act.because, "policy", "failed", *words) and support.mentions(state.why_not, *words)
        assert (state.armed, state.held_packets) == (False, 0)
        assert act.target == f"hold:{state.path}" and state.path.address == lab.hosts[1].service
        facts = kit.status(lab.hosts[0])
        assert (facts["holds"], facts["holds_wanted"]) == (0, 1)
        assert facts["holds_refused"] == {str(state.path): state.why_not}
        assert kit.queue_of(near) == before
        assert running.end() == 0
    assert kit.queue_of(near) == before
    if chosen:
        support.run(["tc", "-n", near, "qdisc", "delete", "dev", "rail1", "root"])


def test_a_dry_run_says_what_it_would_hold(lab, heard, tmp_path) -> None:
    with controller(lab, tmp_path, "fq") as running:
        act, state = told(heard, Act), told(heard, HoldState)
        assert (act.actuator, act.outcome) == ("hold", "dry_run")
        assert support.mentions(act.what, "h2", "10.1.1.1", "rail1")
        assert act.after == {"threshold_us": 1000, "longest_us": 50_000} and act.before == {}
        assert not state.armed and support.mentions(state.why_not, "dry run")
        facts = kit.status(lab.hosts[0])
        assert (facts["holds"], facts["holds_wanted"], facts["holds_refused"]) == (0, 1, {})
        assert running.end() == 0
