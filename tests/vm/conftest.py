"""Starts the guest with the session, so that it works while other tiers are tested, and ends it with the session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import guest
import pytest
import support

_started = pytest.StashKey[guest.Guest]()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Boot with exactly those tests that were selected out here."""
    chosen = [inner for item in session.items if (inner := inner_of(item))]
    wanted = any("guest_run" in getattr(item, "fixturenames", ()) for item in session.items)
    if not wanted or session.config.option.collectonly or os.geteuid() != 0 or support.missing("second kernel"):
        return (yield)
    with tempfile.TemporaryDirectory(prefix="swerve-guest-") as shared:
        running = session.config.stash[_started] = guest.Guest(chosen, Path(shared), guest.LIMIT_S)
        try:
            return (yield)
        finally:
            running.stop()


def inner_of(item: pytest.Item) -> str | None:
    """The test in the guest that a test out here stands for; None for other tests."""
    inner: str | None = getattr(getattr(item, "callspec", None), "params", {}).get("inner")
    return inner


@pytest.fixture(scope="session")
def started_guest(request: pytest.FixtureRequest) -> guest.Guest | None:
    """The guest that runs; None where there can be none."""
    return request.config.stash.get(_started, None)
