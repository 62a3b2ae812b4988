"""Steering as a whole on a made-up kernel: links and routes come and go, requests fail, processes die anywhere.

Real: controller, engine, acting, journal, overlay, desk, guardian's undo, `swerve steer off`. Made up: the kernel below
`Netlink` (model_kernel), the agent's measurements, time, and that processes are processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path as File
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_kernel import (
    BLACKHOLE,
    Answer,
    ModelKernel,
    ModelNetlink,
    ModelWatch,
    gateway,
    hop,
    route_body,
    route_of,
    rule_body,
    rule_of,
)
from steering_kit import MS, SECOND, AtOnce, measured

from pytools import directories
from pytools.errors import RefusedError, SwerveError, UsageError
from pytools.kernel import netns
from pytools.kernel.leftovers import FIRST_ID, is_our_rule, is_our_table
from pytools.kernel.netlink.routing import UNICAST
from pytools.signals import Path
from steering import controller as controller_module
from steering.acting import change_loop, journal, messages, weights
from steering.actuators import overlay as overlay_module
from steering.commands import undo as undo_command
from steering.control import operator_api as desk_module
from steering.control.requests import Drain, Hold, Undo, Undrain, Unhold
from steering.control.server import Peer
from steering.controller import Controller, Options
from steering.guarding import guardian
from steering.plan import canonical
from steering.policy.file import parse
from steering.prefixes import LongestPrefix, key_of

RAILS = (1, 2, 3)
TICK, INSTANT = 100 * MS, 60 * MS
MAIN, SERVICE = 254, 100  # tables of theirs
VIEWS = {20_000: MAIN, 20_001: SERVICE}
SOURCE = "10.9.0.1"
STATIC, BIRD, ZEBRA = 4, 12, 11
MANAGED = ("10.9.0.0/16", "fd00:9::/48")
PLACES = (
    (4, MAIN, "10.9.0.2/32"),
    (4, MAIN, "10.9.0.3/32"),
    (4, MAIN, "10.9.0.0/24"),
    (4, MAIN, "0.0.0.0/0"),
    (4, SERVICE, "10.9.0.2/32"),
    (6, MAIN, "fd00:9::2/128"),
    (6, MAIN, "fd00:9::/64"),
)
PEERS = {"h2": "10.9.0.2", "h3": "10.9.0.3", "h6": "fd00:9::2"}
ADDRESSES = ("10.9.0.2", "10.9.0.3", "10.9.0.200", "10.9.7.7", "10.50.0.1", "fd00:9::2", "fd00:9::7", "fd00:50::1")
POLICY = parse("""\
version: 1
manage: {destinations: ["10.9.0.0/16", "fd00:9::/48"]}
safety: {lease: 3s, max_drained_share: 0.67, stale_after: 500ms, baseline_after: 2s}
rules:
  - name: lossy
    when: {signal: loss, above: 0.5, for: 200ms, clear_below: 0.1}
    then: {drain: {}}
    return: {dwell: 1s, max_dwell: 2s, steps: [1.0], step: 200ms, retry_after: 2s}
  - name: congested
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 200ms, clear_below: 1ms}
    then: {shift: {share: 0}}
    return: {dwell: 1s, max_dwell: 2s, steps: [0.1, 0.5, 1.0], step: 300ms, retry_after: 2s}
""")
HEALED = 25 * SECOND  # dwells, steps, what is between two tries, and the longest wait after refusals
CLEAN = 2 * SECOND  # an overlay that has nothing left to do is not due for longer than this
ROOT = Peer(1, 0)
OPTIONS = SimpleNamespace(netns=None, json=False)

rails = st.sampled_from(RAILS)
places_of_routes = st.sampled_from(PLACES)
several = st.dictionaries(rails, st.integers(1, 9), min_size=1)


class Killed(BaseException):
    """A process dies here."""


class Agent:
    """Measures, and takes what is published."""

    missed = (0, 0)

    def __init__(self, machine, received):
        self._machine, self._received = machine, received

    def register(self, selector):
        pass

    def tick(self, now):
        signals, self._machine.signals = self._machine.signals, []
        self._received(signals)

    def poll(self):
        pass

    def publish(self, act):
        self._machine.told.append(act)

    def publish_states(self, states):
        self._machine.states = list(states)

    def close(self):
        pass


class Guardian:
    """Lives, unless the machine says otherwise."""

    pid = 7

    def __init__(self, machine):
        self._machine = machine

    def register(self, selector):
        pass

    def tick(self, now):
        return now

    def live(self):
        return self._machine.guarded

    def leave(self):
        pass


class Selector:
    """Has what the kernel announced, and never waits."""

    def __init__(self, watches):
        self.watches, self._overlay = watches, None

    def register(self, what, events, data=None):
        if isinstance(what, overlay_module.Overlay):
            self._overlay = what

    def unregister(self, what):
        pass

    def select(self, timeout):
        news = any(watch.news.changed for watch in self.watches)
        return [(SimpleNamespace(data=lambda _: self._overlay.receive()), 1)] if news else []

    def close(self):
        pass


class Steering(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 10**12
        self.kernel = ModelKernel(RAILS)
        self.kernel.before_step = self.step
        self.controller = None
        self.steps_to_live = None
        self.guarded = True
        self.signals, self.told, self.states, self.said = [], [], [], []
        self.condition = dict.fromkeys(RAILS, "good")
        self.rules_since = 0  # all was well
        self.stack = contextlib.ExitStack()
        self.folder = File(self.stack.enter_context(tempfile.TemporaryDirectory()))
        clock = SimpleNamespace(
            monotonic_ns=lambda: self.now,
            time_ns=lambda: self.now,
            thread_time_ns=lambda: self.now,
            sleep=self.sleep,
            monotonic=lambda: self.now / 1e9,
        )
        self.enter(mock.patch.dict(os.environ, SWERVE_STATE_DIR=str(self.folder), SWERVE_RUNTIME_DIR=str(self.folder)))
        timed = (controller_module, change_loop, weights, overlay_module, desk_module, messages, guardian, undo_command)
        for module in timed:
            self.replace(module, "time", clock)
        self.replace(undo_command, "Netlink", lambda: ModelNetlink(self.kernel))
        self.replace(controller_module, "Netlink", self.open_netlink)
        append = journal.append_line
        for module, name, value in (
            (os, "fsync", lambda _: None),
            (os, "fdatasync", lambda _: None),
            (journal, "append_line", lambda *a: (self.step(), append(*a), self.step())),
            (controller_module, "Later", AtOnce),
            (overlay_module, "NetlinkWatch", lambda ours: ModelWatch(self.kernel, ours)),
            (controller_module.selectors, "DefaultSelector", lambda: Selector(self.kernel.watches)),
            (controller_module, "AgentLink", lambda path, kinds, received, *_: Agent(self, received)),
            (controller_module, "GuardianLink", lambda *_: Guardian(self)),
            (guardian, "_say", self.said.append),
            (undo_command, "_stop_controller", lambda _: self.ask_to_stop()),
            (messages, "tell", lambda _, acts: self.told.extend(acts)),
            (undo_command.attach, "clean", lambda _: []),
            (undo_command.click, "echo", self.said.append),
        ):
            self.replace(module, name, value)
        self.scope = netns.scope()
        journal.directory(None)

    def open_netlink(self):
        self.netlink = ModelNetlink(self.kernel)
        return self.netlink

    def enter(self, context):
        return self.stack.enter_context(context)

    def replace(self, module, name, value):
        self.enter(mock.patch.object(module, name, value))

    def teardown(self):
        self.kernel.before_step = lambda: None
        self.bury()
        self.stack.close()

    def sleep(self, seconds):
        self.now += int(seconds * SECOND)

    # ---- processes ----

    def step(self):
        """Called before and after everything that a process leaves behind."""
        if self.steps_to_live is None:
            return
        self.steps_to_live -= 1
        if self.steps_to_live < 0:
            self.steps_to_live = None
            raise Killed

    def mortal(self, act):
        """Let a process do something; whether it lives."""
        try:
            act()
        except Killed:
            self.bury()
            return False
        return True

    def bury(self):
        """The controller is dead: it does nothing more."""
        if self.controller is not None:
            self.netlink.socket.dead = True
            self.controller.close()
        self.controller = None
        self.kernel.watches.clear()

    def entries(self):
        return journal.read(directories.state_dir(None) / journal.FILE)

    @initialize(kind=st.sampled_from(["hops", "group", "metric"]))
    def begin(self, kind="hops"):
        for place in (PLACES[0], PLACES[5]):
            self.lay(place, kind, {1: 1, 2: 1, 3: 1})
        self.start()
        self.time_passes(4)

    @precondition(lambda self: self.controller is None)
    @rule()
    def start(self):
        """A controller begins, whatever one before it left."""

        def begin():
            self.controller = None
            made = Controller(POLICY, Options(apply=True), self.said.append)
            self.controller = made

        self.guarded = True
        try:
            lives = self.mortal(begin)
        except RefusedError as refusal:
            assert self.taken(), f"refused without a reason: {refusal}"
            assert not any(is_our_rule(rule_of(body)) for body in self.kernel.rules)
            return
        except SwerveError:
            return  # a request of it failed
        if lives:
            assert self.in_force() == set(), "what was in force is not any more"
            assert self.entries().in_force(self.scope) == {}
            self.settle()

    def taken(self):
        """Whether somebody uses a table of ours."""
        return any(is_our_table(key[1]) and body[5] != 201 for key, body in self.kernel.routes.items())

    @rule(steps=st.integers(0, 40))
    def doom(self, steps):
        """Whoever runs dies after so many steps."""
        self.steps_to_live = steps

    @precondition(lambda self: self.controller is not None)
    @rule(guardian=st.sampled_from(["undoes", "dies", "is dead"]), steps=st.integers(0, 9))
    def kill(self, guardian, steps=0):
        """The controller is killed, or stops renewing its lease and is killed for that."""
        self.bury()
        self.steps_to_live = steps if guardian == "dies" else None
        if guardian != "is dead":
            self.guard()

    @precondition(lambda self: self.controller is None)
    @rule()
    def guard(self):
        """The guardian undoes."""

        failing = +self.kernel.failing

        def undo():
            netlink = ModelNetlink(self.kernel)
            code, acts = guardian.undo(
                netlink, directories.state_dir(None) / journal.FILE, self.scope, "the controller died"
            )
            self.told += acts
            assert code == 0 or failing
            if not failing:
                self.is_undone()

        self.mortal(undo)

    @rule()
    def off(self):
        """`swerve steer off`."""
        self.kernel.failing.clear()
        if self.mortal(lambda: undo_command.take_back(OPTIONS, True)):
            assert self.controller is None
            self.is_undone()

    def ask_to_stop(self):
        if self.controller is None:
            return False
        self.end()
        return True

    @precondition(lambda self: self.controller is not None)
    @rule()
    def stop(self):
        """SIGTERM."""
        self.kernel.failing.clear()
        if self.mortal(self.end):
            self.is_undone()

    def end(self):
        self.controller.stop(signal.SIGTERM)
        ending = self.controller
        ending.run()
        self.controller = None

    def is_undone(self):
        """Nothing of ours is left, and that is what is told."""
        assert self.kernel.ours() == []
        assert self.entries().in_force(self.scope) == {}
        for address, source in self.packets():
            assert self.kernel.look_up(address, source) == self.kernel.look_up(address, source, ours=False)

    # ---- time ----

    @rule(ticks=st.integers(1, 8))
    def time_passes(self, ticks):
        for _ in range(ticks):
            self.tick()
        self.settle()

    def tick(self):
        self.now += TICK
        if self.controller is not None:
            self.signals = [each for rail in RAILS for each in self.measure(rail)]
            self.turn()

    def turn(self):
        self.mortal(self.controller.turn)

    def settle(self):
        """Let the controller hear of everything and answer to it, while nothing else happens."""
        for _ in range(4):
            if self.controller is None:
                return
            self.now += INSTANT
            self.turn()
            if self.clean():
                self.all_agrees()
                return

    def clean(self):
        """Whether the controller has done all it wants to."""
        if self.controller is None:
            return False
        overlay = self.controller.overlay
        taken = overlay.complaints and all("is used by protocol" in each for each in overlay.complaints)
        changed = any(watch.news.changed for watch in self.kernel.watches)
        return (taken or overlay.due_ns > self.now + CLEAN) and not changed

    @rule()
    def requests_succeed_again(self):
        """What could not be done is done a little later."""
        self.kernel.failing.clear()
        self.time_passes(12)
        assert self.controller is None or self.clean(), f"it never ends: {self.said[-3:]}"

    def measure(self, rail):
        alive = self.kernel.carrier[f"rail{rail}"]
        for name, address in PEERS.items():
            family = 6 if ":" in address else 4
            path = Path("h1", name, address, gateway(rail, family), f"rail{rail}")
            condition = self.condition[rail] if alive else "dead"
            if condition == "silent":
                continue
            carries = any(over == f"rail{rail}" for _, over, _ in getattr(self.kernel.look_up(address), "hops", ()))
            value = {"good": 0, "bad": 20 * MS, "bad under load": 20 * MS * carries, "dead": None}[condition]
            lost = 5 * (value is None)
            yield measured(path, self.now, value, lost=lost, received=5 - lost)

    @rule(rail=rails, condition=st.sampled_from(["bad", "bad under load", "dead"]))
    def gets_worse(self, rail, condition):
        self.becomes(rail, condition)

    @rule(rail=rails, condition=st.sampled_from(["good", "silent"]))
    def becomes(self, rail, condition):
        if self.controller is None:  # a service manager starts it again
            self.start()
            self.time_passes(4)
        self.condition[rail] = condition
        self.time_passes(6)

    # ---- the world ----

    @rule(kind=st.sampled_from(["group", "nexthop", "route", "rule", "dump"]), times=st.integers(1, 3))
    def requests_fail(self, kind, times):
        self.kernel.failing[kind] += times

    @rule()
    def guardian_hangs(self):
        self.guarded = False
        before = self.controller and self.steered()
        self.time_passes(4)
        assert not self.controller or self.steered() <= before, "acted without a guardian"
        self.guarded = True

    @rule(rail=rails, there=st.booleans())
    def carrier(self, rail, there):
        self.kernel.set_carrier(f"rail{rail}", there)

    @rule(gone=st.sets(rails, min_size=1), heard=st.booleans())
    def flap(self, gone, heard):
        """Carriers are lost and found, with or without a look between."""
        for there in (False, True):
            for rail in gone:
                self.kernel.set_carrier(f"rail{rail}", there)
            self.check_packets()
            if heard:
                self.settle()

    @rule(rail=rails)
    def replug(self, rail):
        """A device is made again, under another index."""
        self.kernel.remove(f"rail{rail}")

    @rule(
        place=places_of_routes,
        kind=st.sampled_from(["hops", "group", "metric"]),
        hops=st.dictionaries(rails, st.integers(1, 9), min_size=2),
    )
    def they_route(self, place, kind, hops):
        self.lay(place, kind, hops)
        self.settle()

    @rule(place=places_of_routes, kind=st.sampled_from(["hop", "blackhole", "nothing"]), rail=rails)
    def they_leave_no_choice(self, place, kind, rail):
        self.lay(place, kind, {rail: 1})

    def lay(self, place, kind, hops):
        """Somebody's route to a prefix, instead of what there was."""
        family, table, prefix = place
        kernel = self.kernel
        kernel.withdraw(family, table, prefix)
        listed = [hop(rail, family, kernel, weight) for rail, weight in hops.items()]
        if kind == "hops":
            kernel.put(route_body(prefix, table, STATIC, listed))
        elif kind == "hop":
            kernel.put(route_body(prefix, table, STATIC, listed[:1]))
        elif kind == "metric":
            for metric, one in enumerate(listed, 10):
                kernel.put(route_body(prefix, table, STATIC, [one], metric))
        elif kind == "blackhole":
            kernel.put(route_body(prefix, table, STATIC, kind=BLACKHOLE))
        elif kind == "group":
            members = {10 * family + rail: weight for rail, weight in hops.items() if kernel.carrier[f"rail{rail}"]}
            for number in members:
                rail = number - 10 * family
                if number not in kernel.nexthops:
                    kernel.put_nexthop(number, family, gateway(rail, family), f"rail{rail}", STATIC)
            if members:
                number = 500 + PLACES.index(place)
                kernel.put_group(number, members, STATIC)
                kernel.put(route_body(prefix, table, STATIC, number))

    @rule(there=st.booleans())
    def they_route_by_source(self, there):
        body = rule_body(4, 30_000, SERVICE, f"{SOURCE}/32", STATIC)
        if there != (body in self.kernel.rules):
            self.kernel.rules.append(body) if there else self.kernel.rules.remove(body)
            self.kernel.tell(overlay_news(routes=False))

    @rule(hops=several)
    def they_change_a_group(self, hops):
        """One request of theirs re-weights whatever uses it."""
        for place in (PLACES[0], PLACES[1]):
            number = 500 + PLACES.index(place)
            members = {40 + rail: weight for rail, weight in hops.items() if 40 + rail in self.kernel.nexthops}
            if number in self.kernel.groups and members:
                self.kernel.put_group(number, members, STATIC)

    @precondition(lambda self: self.ours_in_kernel())
    @rule(data=st.data())
    def somebody_deletes_one_of_ours(self, data):
        chosen = data.draw(st.sampled_from(self.ours_in_kernel()))
        if isinstance(chosen, bytes):
            self.kernel.rules.remove(chosen)
            self.kernel.tell(overlay_news(routes=False))
        elif isinstance(chosen, int):
            if chosen in self.kernel.nexthops or chosen in self.kernel.groups:
                self.kernel.delete(chosen)
        else:
            self.kernel.withdraw(*chosen[:3])

    def ours_in_kernel(self):
        kernel = self.kernel
        found = [body for body in kernel.rules if is_our_rule(rule_of(body))]
        found += [key for key, body in kernel.routes.items() if kernel.is_ours(key[1], body[5])]
        return found + [number for number in (*kernel.nexthops, *kernel.groups) if number >= FIRST_ID]

    @rule()
    def somebody_flushes_our_tables(self):
        for family, table, prefix, _ in list(self.kernel.routes):
            if is_our_table(table):
                self.kernel.withdraw(family, table, prefix)

    @rule(ahead=st.integers(0, 3), group=st.booleans())
    def somebody_takes_an_id_of_ours(self, ahead, group):
        """One that we have not used yet, or do not use any more."""
        number = FIRST_ID + ahead
        while number in self.kernel.nexthops or number in self.kernel.groups:
            number += 1
        if self.kernel.carrier["rail1"]:
            self.kernel.put_nexthop(number, 4, "10.1.1.99", "rail1", BIRD)
            if group:
                self.kernel.put_group(number + 1_000, {number: 1}, BIRD)

    @rule(there=st.booleans(), table=st.sampled_from(list(VIEWS)))
    def somebody_uses_a_table_of_ours(self, there, table):
        self.kernel.withdraw(4, table, "10.77.0.0/16")
        if there:
            self.kernel.put(route_body("10.77.0.0/16", table, BIRD, [hop(1, 4, self.kernel)]))

    @precondition(lambda self: any(number >= FIRST_ID for number in self.kernel.groups))
    @rule(data=st.data())
    def zebra_rewrites_a_group(self, data):
        """It puts nexthops of its own into a group that it saw, with the same hops."""
        self.rewrite(data.draw(st.sampled_from([each for each in self.kernel.groups if each >= FIRST_ID])))

    def rewrite(self, number):
        kernel, members = self.kernel, {}
        for place, member in enumerate(kernel.groups[number][1]):
            known = kernel.nexthop_of(kernel.nexthops[member])
            assert known.ifindex is not None
            own = 9_000 + 10 * len(kernel.nexthops) + place
            kernel.put_nexthop(own, known.family, known.gateway, kernel.links[known.ifindex], ZEBRA)
            members[own] = 256
        kernel.put_group(number, members, ZEBRA)

    # ---- the operator ----

    @precondition(lambda self: self.controller is not None)
    @rule(
        request=st.one_of(
            st.builds(Drain, st.sampled_from(["rail1", "rail2", "10.3.1.1"]), for_ns=st.sampled_from([0, SECOND])),
            st.builds(Undrain, st.sampled_from(["rail1", "rail2", "10.3.1.1"])),
            st.builds(Undo, st.integers(1, 3), hold_ns=st.sampled_from([0, SECOND])),
            st.just(Hold()),
            st.just(Unhold()),
        )
    )
    def operator(self, request):
        with contextlib.suppress(RefusedError, UsageError):  # the last hop, or nothing to take back
            self.mortal(lambda: self.controller.desk.answer(request, ROOT))
        self.settle()

    @precondition(lambda self: self.rules_since > 8)
    @rule()
    def all_is_well_for_long(self):
        """However it got here: what they have comes into force again."""
        self.steps_to_live, began = None, self.now
        self.kernel.failing.clear()
        self.somebody_uses_a_table_of_ours(False, 20_000)
        self.somebody_uses_a_table_of_ours(False, 20_001)
        if self.controller is None:
            self.start()
        self.guarded = True
        for request in (Undrain("rail1"), Undrain("rail2"), Undrain("10.3.1.1"), Unhold()):
            self.operator(request)
        for rail in RAILS:
            self.condition[rail] = "good"
            self.kernel.set_carrier(f"rail{rail}", True)
        self.settle()
        self.rules_since = 0
        for _ in range(HEALED // SECOND):
            self.time_passes(SECOND // TICK)
            if self.clean() and not self.steered() and self.now > began + 2 * SECOND:
                break
        assert self.clean() and self.steered() == set() and self.in_force() == set(), (
            "all is well, and not as they have it"
        )

    # ---- what must hold ----

    def packets(self):
        return [(address, source) for address in ADDRESSES for source in ("", SOURCE)[: 1 + (":" not in address)]]

    def groups(self):
        return self.controller.engine.groups

    def in_force(self):
        found = [rule_of(body) for body in self.kernel.rules if is_our_rule(rule_of(body))]
        return {(each.family, VIEWS[each.table]) for each in found}

    def steered(self):
        return {name for name, group in self.groups().items() if group.current != group.original}

    @invariant()
    def nobody_elses_object_is_written(self):
        assert self.kernel.violations == []
        self.rules_since += 1

    @invariant()
    def check_packets(self):
        """No packet is without a way when theirs has one, and what is not managed goes as they route it."""
        inline = any(body[5] == ZEBRA for body in self.kernel.routes.values()) or self.inline()
        for address, source in self.packets():
            theirs = self.kernel.look_up(address, source, ours=False)
            found = self.kernel.look_up(address, source)
            if "50" in address.split(".")[1:2] or address == "fd00:50::1":
                assert found == theirs
            elif theirs is not None and theirs.kind == UNICAST:
                assert found is not None and found.kind == UNICAST and found.hops, f"{address} has no route"
                if self.alive(theirs) and not inline:
                    assert self.alive(found), f"{address} leaves by a dead link: {found}"

    def inline(self):
        """Whether routes of ours list their hops themselves."""
        return any(
            is_our_table(key[1]) and route_of(body).nexthop_id is None and route_of(body).kind == UNICAST
            for key, body in self.kernel.routes.items()
        )

    def alive(self, answer: Answer):
        return any(self.kernel.carrier[interface] for _, interface, _ in answer.hops)

    # ---- what must hold when all is heard and done ----

    def all_agrees(self):
        self.packets_follow_theirs()
        self.weights_are_as_told()

    def packets_follow_theirs(self):
        for address, source in self.packets():
            theirs = self.kernel.look_up(address, source, ours=False)
            found = self.kernel.look_up(address, source)
            if theirs is None or theirs.kind != UNICAST:
                assert found == theirs, f"{address} goes by {found}, and they have {theirs}"
                continue
            family = 6 if ":" in address else 4
            wanted = self.ways(family, theirs.table, theirs.prefix)
            assert {pair[:2] for pair in found.hops} <= wanted, f"{address} leaves by a hop that is not theirs: {found}"
            if self.alive(theirs):
                assert self.alive(found)

    def ways(self, family, table, prefix):
        """Every hop of their routes to a prefix, worse ones as well."""
        return {
            pair[:2]
            for key, body in self.kernel.routes.items()
            if key[:3] == (family, table, prefix) and route_of(body).kind == UNICAST
            for pair in self.kernel.hops(body)
        }

    def best(self, family, table, prefix):
        """Their best route to a prefix: to it, or what covers it."""
        number, length = key_of(prefix)[2], key_of(prefix)[1]
        fitting = [
            (-route_key[1], key[3], body)
            for key, body in self.kernel.routes.items()
            if key[:2] == (family, table)
            and (route_key := key_of(key[2]))[1] <= length
            and LongestPrefix({route_key: True}).around((family, length, number))
        ]
        return min(fitting)[2] if fitting else None

    def weights_are_as_told(self):
        """Engine, journal and acts say what the kernel has; where nothing was decided it has what they have."""
        groups = self.groups()
        by_prefix = {
            (name.split(":")[1], destination): group
            for name, group in groups.items()
            for destination in group.destinations
        }
        steered = self.steered()
        names = {"main": MAIN, str(SERVICE): SERVICE}
        for (family, table, prefix, _), body in self.kernel.routes.items():
            if table not in VIEWS or body[5] != 201 or route_of(body).kind != UNICAST:
                continue
            [name] = [name for name, number in names.items() if number == VIEWS[table]]
            group = by_prefix.pop((name, prefix), None)
            assert group is not None, f"a route to {prefix} that is no target's"
            there = [(canonical(via), interface, weight) for via, interface, weight in self.kernel.hops(body)]
            theirs = self.best(family, VIEWS[table], prefix)
            usable = [pair for pair in self.kernel.hops(theirs) if self.kernel.carrier[pair[1]]]
            told = [
                (m.gateway, m.interface, dict(group.current).get(m.nexthop_id, 0))
                for m in group.members
                if dict(group.current).get(m.nexthop_id)
            ]
            assert sorted(there) == sorted(told), f"{prefix}: the kernel has {there}, and {told} is told"
            whole = [(m.gateway, m.interface, m.weight) for m in group.members if m.weight]
            assert sorted(whole) == sorted(usable), f"{prefix}: they have {usable}, and {whole} counts as theirs"
            if group.target not in steered and not self.inline():
                assert there == usable, f"{prefix}: weights are {there}, and theirs {usable}"
        assert by_prefix == {} or all(not group.original for group in by_prefix.values()), f"no route for {by_prefix}"
        views = {(6 if ":" in name.split(":", 2)[2] else 4, names[name.split(":")[1]]) for name in steered}
        assert self.in_force() == views, f"rules for {self.in_force()}, and {steered} are steered"
        noted = {name: (act.after, act.original) for name, act in self.entries().in_force(self.scope).items()}
        assert noted == {name: (groups[name].current, groups[name].original) for name in steered}
        for state in self.states:
            if state.weight_actual:
                assert any(
                    dict(group.current).get(group.member(state.path)) == state.weight_actual
                    for group in groups.values()
                )

    @precondition(lambda self: self.clean())
    @rule()
    def a_second_look_changes_nothing(self):
        before = self.kernel.requests
        self.steps_to_live = None
        self.kernel.failing.clear()
        self.controller.refresh(self.now)
        assert self.kernel.requests == before, "a second look changed something"
        assert self.clean()


def overlay_news(routes):
    from pytools.kernel.netlink.monitor import News

    return News(True, routes)


# The same examples each time: what a longer search finds is for whoever looks, not for who changes something else.
Steering.TestCase.settings = settings(max_examples=50, stateful_step_count=35, derandomize=True)
TestSteering = pytest.mark.slow(Steering.TestCase)


@pytest.fixture
def machine():
    made = Steering()
    yield made
    made.teardown()


def begun(machine, kind="hops"):
    machine.begin(kind)
    assert machine.clean()
    return machine


def test_an_id_that_somebody_takes_between_two_looks_is_left_to_him(machine):
    """The hop would have led to his gateway."""
    begun(machine).flap({1}, heard=False)
    machine.kernel.put_nexthop(FIRST_ID, 4, "10.1.1.99", "rail1", BIRD)
    machine.settle()
    assert machine.clean() and machine.kernel.violations == []
    assert "10.1.1.99" not in {
        via for key, body in machine.kernel.routes.items() for via, *_ in machine.kernel.hops(body)
    }


def test_routes_that_went_with_all_their_links_before_a_second_look_are_made_again(machine):
    machine.begin()
    machine.bury()
    machine.start()
    machine.flap(set(RAILS), heard=False)
    machine.settle()
    assert machine.clean()


def inline(machine):
    """zebra is seen to write into our groups."""
    begun(machine)
    number = next(each for each in machine.kernel.groups if each >= FIRST_ID)
    machine.rewrite(number)
    machine.settle()
    assert machine.inline() and machine.clean()


@pytest.mark.parametrize("kind", ["hops", "nothing"])
def test_a_route_that_could_not_be_changed_or_deleted_once_is_so_later(machine, kind):
    inline(machine)
    machine.kernel.failing["route"] = 1
    machine.lay(PLACES[0], kind, {1: 3, 2: 4})
    machine.settle()
    assert not machine.clean()
    machine.requests_succeed_again()


def test_a_single_hop_that_is_left_is_not_kept_in_force_for_its_weight(machine):
    """Deciding takes the weight of a single hop to be of no account, so nobody would have taken it back."""
    begun(machine)
    machine.they_route(PLACES[0], "metric", {1: 1, 2: 2, 3: 1})
    machine.gets_worse(1, "bad")
    assert "overlay:main:10.9.0.2/32" in machine.steered()
    machine.replug(1)
    machine.settle()
    assert machine.clean() and machine.steered() == set()


def test_what_others_make_of_weights_in_force_is_noted_under_the_act_they_come_from(machine):
    begun(machine)
    machine.lay(PLACES[1], "hops", {1: 1, 2: 1, 3: 1})
    machine.settle()
    machine.gets_worse(1, "bad")
    [act] = [each for each in machine.entries().in_force(machine.scope).values() if "10.9.0" in each.target]
    machine.lay(PLACES[0], "hops", {1: 1, 3: 5})
    machine.settle()  # compares journal, engine and kernel
    noted = machine.entries().in_force(machine.scope)
    assert len([name for name in noted if "10.9.0" in name]) == 2, "one target has become two"
    assert noted[act.target].because == act.because and noted[act.target].act_id == act.act_id
