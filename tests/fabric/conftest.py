"""What tests begin with: a host with two rails, a fake agent in it and a policy, or a lab with real agents.

A module says what it wants different: `LAB` for `Lab.up`, `NEEDS` for `support.require`, `POLICY`.
"""

from __future__ import annotations

import pytest
import steering_kit as kit
import support

from pytools.lab import Lab


@pytest.fixture
def host(make_namespace):
    return kit.two_rails(make_namespace(), make_namespace())


@pytest.fixture
def agent(host):
    running = kit.FakeAgent(host.netns)
    yield running
    running.close()


@pytest.fixture
def policy(request, tmp_path):
    return kit.policy_file(tmp_path, getattr(request.module, "POLICY", kit.POLICY))


def lab_of(module, unique_name):
    support.require("bcc", "netns", *getattr(module, "NEEDS", ()))
    return Lab.up(unique_name(), **{"hosts": 2, "rails": 2, **getattr(module, "LAB", {})})


@pytest.fixture
def lab(request, unique_name):
    with lab_of(request.module, unique_name) as made:
        yield made


@pytest.fixture(scope="module")
def measured_lab(request, unique_name):
    """A lab with agents on all hosts, for all tests of a module."""
    with lab_of(request.module, unique_name) as made:
        kit.agents(made)
        yield made


@pytest.fixture
def observer(lab):
    """Agents on all hosts of the lab, and what they publish."""
    with kit.measuring(lab) as heard:
        yield heard
