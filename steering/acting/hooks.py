"""Hooks of rules: what began and what is over is found, told by calls, and reported. One thread; nothing here waits.

Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from pytools import directories, log
from pytools.kernel import netns
from pytools.signals import Act
from pytools.units import SECOND
from steering.acting import acts_file, messages
from steering.acting.hook_calls import Delivery, HookCalls, Told, event_of
from steering.acting.hook_settings import Settings, settings_of
from steering.deciding.engine import Engine
from steering.deciding.notices import Notice, Notices
from steering.policy.model import Policy


class HookActing:
    """Has hooks called, or says what they would be told.

    Parameters
    ----------
    policy : Policy
        The policy; without `hooks` in it nothing is told.
    apply : bool
        Else nothing is sent.
    engine : Engine
        Knows the paths.
    """

    def __init__(self, policy: Policy, apply: bool, engine: Engine, file: Path, output: messages.Output) -> None:
        self._apply, self._engine, self._output = apply, engine, output
        self._settings = {name: settings_of(name, hook) for name, hook in policy.hooks.items()}
        self._notices = Notices(policy)
        self._scope = netns.scope()
        self._want_ns = 0
        self._calls = HookCalls(file, self._scope, self._told)

    def begin(self) -> None:
        """Go on with what a controller before us has told."""
        if self._apply:
            now = time.monotonic_ns()
            self._notices.adopt(self._calls.load(), now)
            self._want({}, now)

    def _want(self, over: dict[str, str], now: int) -> None:
        self._want_ns = now + SECOND
        self._calls.want(self._notices.open.values(), self._settings.values(), over, now, self._engine.paths)

    def turn(self, now: int, frozen: bool) -> None:
        """Look at the paths, unless frozen, and have hooks called; to be done after acts."""
        if not frozen:
            began, ended = self._notices.look(self._engine.paths, now, time.time_ns())
            if not self._apply:
                for would in self._notices.would_call(began, ended, self._engine.paths):
                    self._pretend(self._settings[would.hook], would.notice, would.over)
            elif began or ended or (self._notices.open and now >= self._want_ns):
                self._want({notice.id: why for notice, why in ended}, now)
        if self._apply:
            self._calls.turn(now, time.time_ns())

    def _pretend(self, hook: Settings, notice: Notice, over: str) -> None:
        """Say what would be sent, and to whom."""
        would = Delivery(hook, notice, notice.id, over=over)
        event = event_of(would, len(self._notices.open), self._scope, time.time_ns())
        self._output.say(f"hook {hook.name} would be told ({hook.to}): {json.dumps(event, ensure_ascii=False)}")
        facts = hook.name, hook.to, notice, bool(over)
        self._output.send(messages.notified(self._output.host, *facts, "dry_run", over))

    def _told(self, news: Told) -> None:
        if news.failure:
            self._output.say(f"hook {news.delivery.hook.name}: {news.text}")
        self._output.send(_act_of(news, self._output.host))

    def take_back(self, why: str, timeout_s: float) -> str:
        """Tell every hook that all is over, as far as there is time; who was not told."""
        if not self._apply:
            return ""
        self._calls.end_all(why, time.monotonic_ns())
        left = self._calls.finish(timeout_s)
        return ", ".join(sorted({each.hook.name for each in left}))

    @property
    def outstanding(self) -> bool:
        """Whether anybody was told of something that is not over."""
        return self._apply and bool(self._calls.deliveries)

    def facts(self) -> dict[str, object]:
        if not self._notices.needed and not self._calls.deliveries:
            return {}
        return {"hooks": self._calls.facts(), "notices": len(self._notices.open), "notices_lost": self._notices.dropped}


def _act_of(news: Told, host: str) -> Act:
    hook, notice, over = news.delivery.hook, news.delivery.notice, bool(news.delivery.over)
    outcome: messages.Outcome = "failed" if news.failure else "undone" if news.over else "applied"
    lasted = (time.monotonic_ns() - notice.seen_ns) / SECOND
    when = f", {lasted:.1f} s after it was measured" if outcome == "applied" else ""
    why = f"{news.delivery.over or notice.because}; {news.text}{when}"
    return messages.notified(host, hook.name, hook.to, notice, over, outcome, why)


def undo(name: str | None, why: str, timeout_s: float) -> tuple[list[Act], list[str]]:
    """Tell whoever a controller that is gone has told that it is over; acts, and what could not be told, in lines.

    For who has no policy: `swerve steer off`, and a guardian without a successor.
    """
    acts: list[Act] = []
    host = directories.instance(name)
    calls = HookCalls(directories.hook_calls(name), netns.scope(), lambda news: acts.append(_act_of(news, host)))
    calls.load()
    calls.end_all(why, time.monotonic_ns())
    left = calls.finish(timeout_s)
    failures = {each["hook"]: each["failure"] for each in calls.facts()}
    return acts, sorted({f"hook {e.hook.name}: {failures.get(e.hook.name) or 'not told in time'}" for e in left})


def main(arguments: list[str]) -> int:
    """The same for a guardian, which is too small to do it itself: name of the instance, why, and seconds."""
    name, why, timeout_s = arguments
    acts, failures = undo(name or None, why, float(timeout_s))
    acts_file.write_now(directories.state_dir(name or None), acts)
    messages.tell(name or None, acts)
    for text in failures:
        log.logger("guardian").info("%s", text)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
