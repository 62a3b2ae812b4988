"""What is done without a controller, or before it has met the agent, is told to whoever watches: each act once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

import pytest
import support
from steering_kit import EVEN, controlled, steered

from pytools import directories

pytestmark = pytest.mark.beside

FREE, DRAINED = ({"10.1.1.1 dev rail1": weight, "10.2.1.1 dev rail2": 1} for weight in (1, 0))


def told(agent, outcome, count=1):
    """The acts with this outcome, once there are so many."""
    found = support.wait_until(lambda: agent.acts_of(outcome)[count - 1 :] and agent.acts_of(outcome), 60, "it is told")
    assert {each.host for each in found} == {"h1"}, "as the agent calls it, not as the namespace is called"
    return found


@contextlib.contextmanager
def deaf(path):
    """An agent that never answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
        sock.listen(0)
        yield
        path.unlink()


def left_behind(host, agent, policy):
    """What a controller and its guardian leave that die at once."""
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        guardian = controller.guardian()
        controller.process.send_signal(signal.SIGSTOP)  # or it replaces its guardian
        os.kill(guardian, signal.SIGKILL)
        controller.kill()
    agent.queueing_ns[1] = 0


def test_a_guardian_says_what_it_undid(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        [made] = told(agent, "applied")
        controller.kill()
        support.wait_until(controller.lock_is_free, 20, "the guardian has gone")
    [undone] = told(agent, "undone")
    assert (undone.act_id, undone.before, undone.after) == (made.act_id, DRAINED, FREE)
    assert (undone.because, undone.under) == ("the controller died", made.under)
    assert undone.decided_ns < undone.acknowledged_ns <= undone.at_ns


def test_a_command_says_what_it_undid(host, agent, policy):
    left_behind(host, agent, policy)
    support.swerve("steer", "undo", "-n", host.netns)
    [undone] = told(agent, "undone")
    assert undone.after == FREE and support.mentions(undone.because, "operator", "everything")


def test_a_controller_says_what_it_undid_before_it_met_the_agent(host, agent, policy):
    left_behind(host, agent, policy)
    with controlled(host, policy, "--apply") as controller:
        [undone] = told(agent, "undone")
        assert support.mentions(undone.because, "controller", "before")
        assert controller.end() == 0
    assert host.weights() == EVEN and len(agent.acts_of("undone")) == 1


@pytest.mark.parametrize("there", ["nobody", "deaf"])
def test_nobody_is_waited_for(host, agent, policy, there):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        guardian = controller.guardian()
        os.kill(guardian, signal.SIGSTOP)  # until what it shall meet is there
        controller.kill()
        agent.close()
        with deaf(directories.agent_socket(host.netns)) if there == "deaf" else contextlib.nullcontext():
            os.kill(guardian, signal.SIGCONT)
            support.wait_until(lambda: host.weights() == EVEN, 10, "the weights are back")
            support.wait_until(controller.lock_is_free, 20, "the guardian has gone")
    assert controller.journal()[-1].kind == "undone"
