"""An engine with two rails to one peer, whose changes are all carried out. Imported as `engine_world`.

Made-up measurements and times, CLOCK_MONOTONIC nanoseconds; nothing here does I/O.
"""

from __future__ import annotations

from policy_kit import liveness
from steering_kit import MS, SECOND, TARGET, group, measured, path

from steering.deciding.engine import Engine
from steering.policy.file import parse

T0 = 10**12
STEP = 20 * MS
RAIL_2_ONLY = ((12, 1),)
ORIGINAL = ((11, 1), (12, 1))
POLICY = parse("""\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: dead
    when: {signal: silence}
    then: {drain: {}}
    return: {dwell: 2s, steps: [0.5, 1.0], step: 500ms, retry_after: 10s}
  - name: congested
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 40ms, clear_below: 1ms}
    then: {drain: {}}
    return: {dwell: 2s, steps: [0.5, 1.0], step: 500ms, retry_after: 60s}
""")


class World:
    """Two rails to one peer, and what a kernel has of them; every change is carried out."""

    def __init__(self, engine=None, now=T0, current=None):
        self.engine, self.now = engine or Engine(POLICY), now
        self.log = []
        self.arrange(current)

    def arrange(self, current=None):
        known = [group({1: [], 2: []}, current=current and dict(current))]
        if current is None and TARGET in self.engine.groups:
            known = [group({1: [], 2: []}, current=dict(self.weights))]
        self.engine.arrange(known, lambda address: (TARGET,) if address == "10.9.0.2" else (), self.now)

    @property
    def weights(self):
        return self.engine.groups[TARGET].current

    def state(self, rail=1):
        return self.engine.paths[path(rail)].state

    def decide(self):
        for change in self.engine.changes(self.now):
            self.log.append((self.now, change))
            self.engine.carried_out(change, self.now, change.after)

    def measure(self, for_ns, dead=(), unknown=(), queueing=()):
        """Let rails be measured for so long: some silent, some never answered yet, some with a queue."""
        began = self.now
        while self.now < began + for_ns:
            self.now += STEP
            missed = (self.now - began) // (10 * MS)
            for rail in (1, 2):
                over = path(rail)
                if rail in dead or rail in unknown:
                    last = None if rail in unknown else self.now - missed * 10 * MS
                    self.engine.take(liveness(over, self.now, missed, last_answer_ns=last), self.now)
                    self.engine.take(measured(over, self.now, None, received=0, lost=5), self.now)
                else:
                    self.engine.take(liveness(over, self.now, answered_sent_ns=self.now), self.now)
                    self.engine.take(measured(over, self.now, 20 * MS if rail in queueing else 0), self.now)
                self.decide()

    def pause(self, for_ns):
        """Hear nothing for so long."""
        end = self.now + for_ns
        while self.now < end:
            self.now += 50 * MS
            self.decide()


def left_for_dead():
    world = World()
    world.measure(SECOND)
    world.measure(SECOND, dead=(1,))
    assert world.weights == RAIL_2_ONLY and world.state() == "drained"
    return world
