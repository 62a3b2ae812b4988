"""The operator's orders: what they mean, their file, what refuses them; acts taken back; who confirms first."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from steering_kit import FIRST, MS, ORIGINAL, POLICY, SECOND, SECOND_HOP, TARGET, AtOnce, group, measured, path

from pytools.errors import RefusedError, SwerveError, UsageError
from steering import elapsed
from steering.acting import acts_file, journal, undo
from steering.cli_types import Flow, flow_text
from steering.control import kept_orders, orders, pins, requests, stop_file
from steering.deciding.engine import Engine
from steering.deciding.overrides import NONE, Moment, Override, Overrides
from steering.guarding import confirming
from steering.plan import FlowKey, nexthop_group, weights_of
from steering.policy.file import parse

START = 10**12
RULES = parse(POLICY)
NOW = Moment(1_700_000_000 * SECOND, 100 * SECOND, "this")


def host(queueing=(0, 0), ticks=5):
    """An engine that has measured two rails for a while, and the time."""
    engine = Engine(RULES)
    engine.arrange([group({1: [], 2: []})], lambda _: (TARGET,), START)
    now = START
    for _ in range(ticks):
        now += 20 * MS
        for rail, value in enumerate(queueing, start=1):
            engine.take(measured(path(rail), now, value), now)
    return engine, now


def objection(engine, now, *fresh):
    return pins.objection(RULES, engine.paths, engine.groups[TARGET], Overrides(fresh), now)


# ---- what may be ordered ----


def test_a_drain_names_an_interface_or_a_gateway():
    groups = [group({1: [], 2: []})]
    [order] = orders.to_drain(groups, "rail1", "", 0, NOW, "me", "why")
    assert (order.kind, order.interface, order.gateway, order.target) == ("drain", "rail1", "", "")
    [order] = orders.to_drain(groups, "10.2.1.1", "10.9.0.0/16", 0, NOW, "me", "")
    assert (order.interface, order.gateway, order.target) == ("rail2", "10.2.1.1", TARGET)
    [order] = orders.to_drain(groups, "10.2.1.1%rail2", "", 0, NOW, "me", "")
    assert order.interface == "rail2"
    for leaves_by, prefix in (("rail3", ""), ("10.2.1.1%rail1", ""), ("rail1", "10.8.0.0/16"), ("rail1", "nonsense")):
        with pytest.raises(UsageError):
            orders.to_drain(groups, leaves_by, prefix, 0, NOW, "me", "")


def test_nothing_is_no_interface():
    drained = Overrides((Override("drain", "rail1"), Override("drain", "rail2")))
    with pytest.raises(UsageError):
        orders.without_drain(drained, [], "", "")
    with pytest.raises(UsageError):
        orders.to_drain([group({1: [], 2: []})], "", "", 0, NOW, "me", "")
    for request in (b'{"type":"undrain","leaves_by":""}', b'{"type":"drain","leaves_by":""}'):
        with pytest.raises(ValueError):
            requests.decode(request)


def test_a_hold_is_found_by_what_people_call_its_target():
    held = Overrides((Override("drain", "rail1"), Override("hold", target=TARGET)))
    for name in (TARGET, "102", "nexthop group 102"):
        assert orders.hold_named(held, name) == TARGET
    assert orders.hold_named(held, "") is None and orders.hold_named(held, "103") is None
    assert orders.hold_named(Overrides((Override("hold"),)), "") == ""


@pytest.mark.parametrize(
    ("until", "target", "longer"),
    [(0, TARGET, True), (0, "", True), (9, TARGET, True), (7, TARGET, False), (0, "another", False)],
)
def test_who_is_held_longer_already(until, target, longer):
    held = Overrides((Override("hold", target=target).lasting(until, NOW), Override("drain", "rail1")))
    assert orders.held_as_long(held, TARGET, 8, NOW) is longer


def test_one_gateway_at_two_interfaces_is_two_orders():
    known = group({1: [], 2: []})
    known = replace(known, members=tuple(replace(member, gateway="fe80::1") for member in known.members))
    assert [o.interface for o in orders.to_drain([known], "fe80::1", "", 0, NOW, "", "")] == ["rail1", "rail2"]
    assert [o.interface for o in orders.to_drain([known], "fe80::1%rail2", "", 0, NOW, "", "")] == ["rail2"]
    assert [o.gateway for o in orders.to_drain([known], "FE80:0::1%rail2", "", 0, NOW, "", "")] == ["fe80::1"]


def test_a_new_order_about_the_same_replaces_the_former():
    first = Override("drain", "rail1", why="one")
    held = Override("hold", target=TARGET)
    both = orders.with_orders(orders.with_orders(NONE, [first, held]), [replace_why(first, "two")])
    assert [order.why for order in both.orders if order.kind == "drain"] == ["two"]
    assert held in both.orders
    left, ended = orders.without_drain(both, [], "rail1", "")
    assert left.orders == (held,) and [order.why for order in ended] == ["two"]


def replace_why(order, why):
    return msgspec.structs.replace(order, why=why)


def test_what_would_leave_nothing_is_objected_to():
    engine, now = host()
    assert objection(engine, now, Override("drain", "rail1")) == ""
    assert "without a nexthop" in objection(engine, now, Override("drain", "rail1"), Override("drain", "rail2"))


def test_what_would_leave_unmeasured_or_drained_paths_is_objected_to():
    engine, now = host(queueing=(0, None))
    assert "not measured" in objection(engine, now, Override("drain", "rail1"))
    engine, now = host()
    assert "no longer" in objection(engine, now + SECOND, Override("drain", "rail1"))
    engine, now = host(queueing=(20 * MS, 0), ticks=10)
    for change in engine.changes(now):
        engine.carried_out(change, now, change.after)
    assert engine.paths[path(1)].state == "drained"
    assert "are drained" in objection(engine, now, Override("drain", "rail2"))
    assert objection(engine, now, Override("drain", "rail1")) == ""
    engine, now = host(queueing=())
    assert objection(engine, now, Override("drain", "rail1")), "nothing is measured at all"


def test_targets_are_found_by_what_people_call_them():
    groups = [group({1: [], 2: []})]
    for name in (TARGET, "102", "nexthop group 102", "10.9.0.2/32"):
        assert orders.target_named(groups, name) == TARGET
    assert orders.target_named(groups, "") == ""
    with pytest.raises(UsageError, match="nexthop_group:102"):
        orders.target_named(groups, "103")


def test_a_pin_goes_where_its_remote_address_is_routed_and_something_is_measured():
    engine, now = host(queueing=(0, None))
    found, member = orders.member_for(engine.groups.values(), "10.9.0.2", "rail1")
    assert (found.target, member.nexthop_id) == (TARGET, FIRST)
    assert pins.pin_objection(RULES, engine.paths, found, member, "10.9.0.2", now) == ""
    found, member = orders.member_for(engine.groups.values(), "10.9.0.2", "10.2.1.1")
    assert "not measured" in pins.pin_objection(RULES, engine.paths, found, member, "10.9.0.2", now)
    for remote, via in (("10.9.0.3", "rail1"), ("10.9.0.2", "rail3"), ("nonsense", "rail1")):
        with pytest.raises(UsageError):
            orders.member_for(engine.groups.values(), remote, via)


# ---- the file ----

_orders = st.builds(
    Override,
    kind=st.sampled_from(["drain", "hold"]),
    interface=st.text(max_size=15),
    gateway=st.text(max_size=15),
    target=st.text(max_size=15),
    until_unix_ns=st.integers(0, 2**62),
    until_boot_ns=st.integers(0, 2**62),
    boot_id=st.sampled_from(["", "this", "another"]),
    lasts_ns=st.integers(0, 2**62),
    why=st.text(max_size=40),
)


@given(st.lists(_orders, max_size=5), st.builds(Moment, st.integers(0, 2**62), st.integers(0, 2**62), st.just("this")))
def test_orders_come_back_from_disk_but_for_those_that_ran_out(tmp_path_factory, listed, now):
    folder = tmp_path_factory.mktemp("orders")
    kept_orders.save(folder, Overrides(tuple(listed)))
    assert (folder / kept_orders.FILE).stat().st_mode & 0o777 == 0o600
    found = kept_orders.load(folder, now)
    assert found.orders == Overrides(tuple(listed)).at(now).orders
    assert [place.name for place in folder.iterdir()] == [kept_orders.FILE]


def test_no_file_is_no_order(tmp_path):
    assert kept_orders.load(tmp_path, NOW) == NONE


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_could_write_is_refused(tmp_path, mode):
    kept_orders.save(tmp_path, NONE)
    (tmp_path / kept_orders.FILE).chmod(mode)
    with pytest.raises(RefusedError, match="writable by"):
        kept_orders.load(tmp_path, NOW)


def test_a_link_or_a_directory_that_others_could_write_is_refused(tmp_path):
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / kept_orders.FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError):
        kept_orders.load(tmp_path, NOW)
    (tmp_path / kept_orders.FILE).unlink()
    kept_orders.save(tmp_path, NONE)
    tmp_path.chmod(0o777)
    with pytest.raises(RefusedError, match="directory"):
        kept_orders.load(tmp_path, NOW)


@given(st.binary(max_size=80) | st.sampled_from([b'{"version":3,"orders":[]}', b'{"version":1}', b"[" * 100_000]))
def test_an_invalid_file_is_an_error_and_not_ignored(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("orders")
    file = folder / kept_orders.FILE
    file.write_bytes(data)
    file.chmod(0o600)
    with pytest.raises(SwerveError, match="not a file of orders"):
        kept_orders.load(folder, NOW)


# ---- the stop file ----


def test_the_stop_file_says_why(tmp_path):
    folder = tmp_path / "host"
    folder.mkdir()
    stop = stop_file.StopFile(folder)
    assert stop.why() == ""
    instance, whole_host = stop_file.places_of(folder)
    instance.touch()
    assert "exists" in stop.why()
    instance.write_bytes(b"two\nlines \x1b[31m\xff")
    os.utime(instance, ns=(1, 1))  # a clock may be coarse
    assert stop.why().startswith("two lines") and "\x1b" not in stop.why()
    stop_file.freeze(whole_host, "everything")
    assert stop.why().endswith("; everything")
    assert stop_file.thaw(instance) and stop_file.thaw(whole_host) and not stop_file.thaw(instance)
    assert stop.why() == ""


def test_a_stop_file_that_was_written_within_one_tick_of_the_clock_is_read_again(tmp_path):
    stop, place = stop_file.StopFile(tmp_path), tmp_path / stop_file.FILE
    place.touch()
    os.utime(place, ns=(1, 1))
    assert "exists" in stop.why()
    place.write_text("noon")
    os.utime(place, ns=(1, 1))
    assert stop.why() == "noon"


def test_a_reason_that_is_no_text_freezes_all_the_same(tmp_path):
    stop_file.freeze(tmp_path / stop_file.FILE, "until \udcff noon")
    assert stop_file.StopFile(tmp_path).why() == "until ? noon"


def test_a_namespace_called_freeze_does_not_stop_the_host(tmp_path):
    (tmp_path / "freeze").mkdir()
    (tmp_path / "host").mkdir()
    assert stop_file.StopFile(tmp_path / "host").why() == ""
    assert stop_file.StopFile(tmp_path / "freeze").why() == ""


def test_a_place_that_cannot_be_looked_at_counts_as_stopped(tmp_path):
    (tmp_path / "freeze").symlink_to("freeze")
    assert "symbolic links" in stop_file.StopFile(tmp_path).why()


# ---- confirmation ----


def _entries(tmp_path, *kinds, run="run-1"):
    with journal.Journal(tmp_path / journal.FILE) as log:
        for kind in kinds:
            log.write(confirming.entry(kind, run, "because", "scope", "test"))
    return tmp_path / journal.FILE


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ((), "open"),
        (("confirmed",), "confirmed"),
        (("expired",), "expired"),
        (("confirmed", "expired"), "confirmed"),
        (("expired", "confirmed"), "expired"),
    ],
)
def test_the_first_word_counts(tmp_path, kinds, said):
    file = _entries(tmp_path, *kinds)
    assert confirming.verdict(file, "run-1") == said
    assert confirming.verdict(file, "run-2") == "open"
    with journal.Journal(file) as log:
        assert confirming.expire(log, "run-1", "scope", "guardian") == (said != "confirmed")
    assert confirming.verdict(file, "run-1") == ("confirmed" if said == "confirmed" else "expired")
    assert journal.read(file).in_force("scope") == {}


def test_a_journal_that_cannot_be_written_does_not_keep_a_run_alive(tmp_path):
    file = _entries(tmp_path)

    class Full(journal.Journal):
        def write(self, *entries, sync=False):
            raise OSError(28, "full")

    with Full(file) as log:
        assert confirming.expire(log, "run-1", "scope", "guardian")


def test_without_a_wait_there_is_no_deadline():
    assert confirming.deadline_in(0) is None and confirming.facts(None) == {}
    deadline = confirming.deadline_in(SECOND)
    assert deadline is not None and 0 < deadline.at_ns - elapsed.now_ns() <= SECOND
    assert confirming.pending(confirming.facts(deadline)) == deadline
    assert confirming.pending({"run": 5}) is None and confirming.pending(None) is None


# ---- taking back ----


def _act(name, before, after, target=TARGET, kind="applied", scope="here"):
    members = group({1: [], 2: []}).members
    return journal.Entry(kind, name, target, members, before, after, f"because of {name}", "rule", scope)


def _done(name, before, after, target=TARGET):
    return [_act(name, before, after, target, kind) for kind in ("failed", "applied")]


def _last(acts):
    return [act.act_id for act in undo.last_acts(acts, "here")]


DOWN, HALF = weights_of({SECOND_HOP: 1}), weights_of({FIRST: 5, SECOND_HOP: 10})


def test_the_last_acts_are_found_newest_first_and_each_once():
    acts = [*_done("a", ORIGINAL, DOWN), *_done("b", DOWN, HALF), *_done("c", HALF, ORIGINAL)]
    assert _last(acts) == ["c", "b", "a"]
    acts += _done(undo.undo_name("c"), ORIGINAL, HALF)
    assert _last(acts) == ["b", "a"]
    assert undo.last_acts(acts, "elsewhere") == []
    other = nexthop_group(103)
    acts += [*_done("d", ORIGINAL, DOWN, target=other), _act("e", HALF, HALF, kind="undone")]
    assert _last(acts) == ["d"]


def test_what_cannot_be_taken_back_does_not_hide_what_is_older():
    acts = [_act(name, ORIGINAL, DOWN) for name in "abcd"]
    gone, failed = {"a", "c"}, {"d"}

    def one(act):
        why = "gone" if act.act_id in gone else "failed" if act.act_id in failed else ""
        return undo.TakenBack(act, why, tried=act.act_id not in gone)

    def undone(acts, count):
        done = undo.take_back(acts, count, one)
        return "".join(each.act.act_id for each in done), undo.exit_code(done)

    assert undone(acts, 1) == ("ab", 0)
    assert undone(acts, 9) == ("abcd", 1)
    assert undone(acts[:1], 1) == ("a", 1), "nothing was taken back"
    assert undone([], 1) == ("", 0)


def test_taking_back_leaves_out_what_an_order_drains():
    act = _act("a", ORIGINAL, DOWN)
    drained = group({1: [], 2: []}, current={FIRST: 5, SECOND_HOP: 10})
    back = undo.change_back(act, drained, {}, {FIRST: "drained"})
    assert back.after == DOWN
    for current in (DOWN, weights_of({SECOND_HOP: 3})):
        assert "undrain" in undo.change_back(act, replace(drained, current=current), {}, {FIRST: ""})


def test_a_change_back_lifts_the_paths_that_get_their_whole_weight():
    engine, now = host(queueing=(20 * MS, 0), ticks=10)
    [change] = engine.changes(now)
    engine.carried_out(change, now, change.after)
    act = _act("a", change.before, change.after)
    back = undo.change_back(act, engine.groups[TARGET], engine.paths)
    assert (back.before, back.after, back.under) == (DOWN, ORIGINAL, "operator")
    assert back.lifted == {path(1)}
    engine.overrides = Overrides((Override("hold", target=TARGET),))
    engine.carried_out(back, now, back.after)
    assert engine.paths[path(1)].state == "healthy", "it never claims a drain that is not"
    assert engine.changes(now + 20 * MS) == []
    assert isinstance(undo.change_back(act, engine.groups[TARGET], engine.paths), str)


# ---- the record of acts ----


def _said(number, actuator="pin", outcome="applied"):
    return samples.act(number, act_id=str(number), because="x" * 200, outcome=outcome, actuator=actuator)


def test_acts_are_kept_within_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(acts_file, "ROTATE_BYTES", 10_000)
    kept = acts_file.ActsFile(tmp_path, AtOnce())
    for number in range(200):
        kept.write(_said(number))
    kept.write(_said(500, "overlay"))
    kept.write(_said(501, "pin", "dry_run"))
    kept.close()
    numbers = [act.at_ns for _, act in acts_file.read(tmp_path)]
    assert numbers == list(range(numbers[0], 200)) and len(numbers) < 60
    assert sum(place.stat().st_size for place in tmp_path.iterdir()) < 22_000
    with (tmp_path / acts_file.FILE).open("ab") as file:
        file.write(b'torn {"\n\xff\n')
    assert len(list(acts_file.read(tmp_path))) == len(numbers)
    assert kept.lost == 0
    with (tmp_path / acts_file.FILE).open("ab") as file:
        file.write(b'{"cut off')  # by a full disk, or with its writer
    kept.write(_said(600))
    assert [act.at_ns for _, act in acts_file.read(tmp_path)][-1] == 600
    kept.close()
    gone = acts_file.ActsFile(tmp_path / "missing", AtOnce())
    gone.write(_said(1))
    assert gone.lost == 1


# ---- what crosses the socket, what is typed ----

_requests = st.one_of(
    st.builds(requests.Drain, leaves_by=st.text(min_size=1, max_size=20), why=st.text(max_size=50)),
    st.builds(requests.Undo, count=st.integers(1, 100), hold_ns=st.integers(0, 1 << 53)),
    st.just(requests.Status()),
)


@given(_requests)
def test_requests_survive_the_way(request_):
    assert requests.decode(requests.encode(request_)) == request_


@given(st.binary(max_size=200) | st.sampled_from([b'{"type":"undo","count":1000}', b'{"type":"drain"}', b"[" * 60_000]))
def test_rubbish_is_refused(data):
    with pytest.raises(ValueError):
        requests.decode(data)


def test_a_reply_fits_into_a_packet_whatever_is_in_it():
    wide = "\x01" * 200_000
    for reply in (
        requests.Reply(4, [wide], wide),
        requests.Reply(0, ["short"] * 30_000),
        requests.Reply(facts={"manual": wide}),
    ):
        data = requests.encode_reply(reply)
        found = requests.decode_reply(data)
        assert len(data) <= requests.REPLY_BYTES and found.code == reply.code
        assert bool(found.lines) == bool(reply.lines) and bool(found.next_step) == bool(reply.next_step)
    small = requests.Reply(1, ["why"], "what next", {"again": True})
    assert requests.decode_reply(requests.encode_reply(small)) == small


def test_what_is_no_text_is_an_error_in_one_line():
    with pytest.raises(UsageError, match="UTF-8"):
        requests.encode(requests.Drain("rail1", why="\udcff"))


@pytest.mark.parametrize(
    ("typed", "flow"),
    [
        ("tcp:10.9.0.1:4000-10.9.0.2:80", FlowKey(6, "10.9.0.1", 4000, "10.9.0.2", 80)),
        ("10.9.0.1:4000-10.9.0.2:80", FlowKey(6, "10.9.0.1", 4000, "10.9.0.2", 80)),
        ("udp:[FD00::1]:4000-[fd00::2]:80", FlowKey(17, "fd00::1", 4000, "fd00::2", 80)),
    ],
)
def test_flows_as_they_are_typed(typed, flow):
    assert Flow().convert(typed, None, None) == flow
    assert Flow().convert(flow_text(flow), None, None) == flow


@given(st.text(max_size=40))
def test_flows_that_are_none(typed):
    import click

    with pytest.raises(click.BadParameter):
        Flow().convert(typed, None, None)
