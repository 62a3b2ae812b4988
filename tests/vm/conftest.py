"""Starts the guests with the session, so that they work while other tiers are tested, and ends them with it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import guest
import pytest
import support

_started = pytest.StashKey[list[guest.Guest]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Boot them with exactly those tests that were selected out here."""
    chosen = [inner for item in session.items if (inner := inner_of(item))]
    wanted = any("guest_runs" in getattr(item, "fixturenames", ()) for item in session.items)
    if not wanted or session.config.option.collectonly or os.geteuid() != 0 or support.missing("second kernel"):
        return (yield)
    with contextlib.ExitStack() as stack:
        running = session.config.stash[_started] = []
        guest.compile_sources()
        for share in guest.shares(chosen):
            shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="swerve-guest-"))
            running.append(guest.Guest(share, Path(shared), guest.LIMIT_S))
            stack.callback(running[-1].stop)
        return (yield)


def inner_of(item: pytest.Item) -> str | None:
    """The test in the guest that a test out here stands for; None for other tests."""
    inner: str | None = getattr(getattr(item, "callspec", None), "params", {}).get("inner")
    return inner


@pytest.fixture(scope="session")
def started_guests(request: pytest.FixtureRequest) -> list[guest.Guest]:
    """The guests that run; none where there can be none."""
    return request.config.stash.get(_started, [])
