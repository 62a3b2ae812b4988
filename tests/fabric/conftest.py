"""A host with two rails, a fake agent in it and a policy: what tests of a real controller begin with."""

from __future__ import annotations

import pytest
import steering_kit as kit


@pytest.fixture
def host(make_namespace):
    return kit.two_rails(make_namespace(), make_namespace())


@pytest.fixture
def agent(host):
    running = kit.FakeAgent(host.netns)
    yield running
    running.close()


@pytest.fixture
def policy(tmp_path):
    return kit.policy_file(tmp_path)
