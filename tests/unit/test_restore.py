"""What is made again after a link was lost, against a made-up kernel whose links come and go while people interfere."""

from __future__ import annotations

import struct
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from steering_kit import GROUP, TARGET, group

from pytools.kernel.netlink import Link, Nexthop, NexthopGroup
from pytools.kernel.netlink import Member as KernelMember
from pytools.kernel.netlink_attributes import attribute, attributes
from pytools.kernel.netlink_messages import group_body, nexthop_body
from pytools.kernel.netlink_routes import by_nexthop, hop_of, route_of, routes_request, with_hops
from pytools.kernel.netlink_watch import Heard
from steering.actuators import restore
from steering.actuators.backup import Ids, wanted
from steering.actuators.memory_file import MemoryFile
from steering.actuators.objects import Objects
from steering.actuators.restore import Memory
from steering.actuators.route_names import hop_member
from steering.plan import Group, weights_of

RAILS = (1, 2, 3)
KNOWN = group({rail: [] for rail in RAILS})
STATIC, ZEBRA = 4, 11


def link(rail, carrier=True, index=None, downs=0):
    return Link(index or 100 + rail, f"rail{rail}", True, carrier, carrier, 1, "veth", 1500, "", downs)


def nexthop(number, rail=None, protocol=STATIC, index=None):
    rail = rail or number - 10
    body = nexthop_body(number, 4, f"10.{rail}.1.1", index or 100 + rail, False, protocol)
    return Nexthop(number, 4, f"10.{rail}.1.1", index or 100 + rail, protocol, body=body)


def kernel_group(members=(11, 12, 13), protocol=STATIC):
    entries = tuple(KernelMember(number, 1) for number in members)
    return NexthopGroup(GROUP, entries, "mpath", protocol, body=group_body(GROUP, entries, protocol))


def group_route(prefix="10.9.0.0/24", number=GROUP, metric=0, protocol=STATIC):
    plain = with_hops(routes_request(4, 254), [hop_of("10.1.1.1", 101, 4)])
    body = by_nexthop(plain, number, metric, protocol)
    return replace(route_of(body), destination=prefix)


def members_of(body):
    value = dict(attributes(body, 8))[2]
    return [number for number, *_ in struct.iter_unpack("=IBBH", value)]


def objects(links=RAILS, nexthops=(11, 12, 13), groups=None, routes=None, flapped=()):
    groups = [kernel_group()] if groups is None else groups
    found = {100 + rail: link(rail, rail in links, downs=int(rail in flapped)) for rail in RAILS}
    routes = (group_route(),) if routes is None and groups else routes or ()
    by_id = {number: nexthop(number) for number in nexthops}
    return Objects(found, by_id, {g.id: g for g in groups}, tuple(routes), {each.name: each for each in found.values()})


WHOLE = objects()


def remembered(*readings, heard=None):
    memory = Memory()
    for reading in readings:
        memory = restore.remember(memory, [KNOWN], reading, heard or Heard())
    return memory


# ---- one thing at a time ----


def test_what_is_whole_needs_nothing():
    assert not restore.restoration(remembered(WHOLE), WHOLE)


def test_nothing_is_made_while_the_link_is_down():
    down = objects((2, 3), (12, 13), [kernel_group((12, 13))])
    memory = remembered(WHOLE, down)
    assert memory.nexthops[11].lost and memory.lost == {}
    assert not restore.restoration(memory, down)


def test_a_nexthop_is_made_again_as_it_was_when_its_link_carries():
    down = objects((2, 3), (12, 13), [kernel_group((12, 13))])
    up = objects(RAILS, (12, 13), [kernel_group((12, 13))])
    want = restore.restoration(remembered(WHOLE, down), up)
    assert (list(want.nexthops), want.groups, want.routes) == ([11], {}, {})
    assert dict(attributes(want.nexthops[11], 8)) == dict(attributes(nexthop(11).body, 8))


def test_it_is_made_on_the_interface_of_its_name():
    gone = replace(WHOLE, nexthops={n: nexthop(n) for n in (12, 13)})
    anew = {107: link(1, index=107), 102: link(2), 103: link(3)}
    up = replace(gone, links=anew, by_name={each.name: each for each in anew.values()})
    want = restore.restoration(remembered(WHOLE, gone), up)
    assert dict(attributes(want.nexthops[11], 8))[5] == (107).to_bytes(4, "little")


def test_a_group_is_made_over_what_is_back_and_its_routes_behind_it():
    nothing = objects((), (), [])
    memory = remembered(WHOLE, nothing)
    assert list(memory.lost) == [TARGET]
    one = objects((2,), (), [])
    want = restore.restoration(memory, one)
    assert list(want.nexthops) == [12] and members_of(want.groups[TARGET]) == [12]
    assert [route_of(body).nexthop_id for body in want.routes[TARGET]] == [GROUP]


def test_a_group_is_not_made_of_a_nexthop_that_the_kernel_refused():
    one = objects((2,), (), [])
    want = restore.restoration(remembered(WHOLE, objects((), (), [])), one, frozenset({12}))
    assert not want


def test_a_group_that_went_with_the_only_member_it_had_left_is_made_over_the_others_at_once():
    drained = objects(RAILS, (11, 12, 13), [kernel_group((12,))])
    lost = objects((1, 3), (11, 13), [])
    want = restore.restoration(remembered(WHOLE, drained, lost), lost)
    assert members_of(want.groups[TARGET]) == [11, 13]
    missed = restore.remember(remembered(WHOLE, drained), [KNOWN], lost, Heard(missed=True))
    assert list(missed.lost) == [TARGET], "it had no other member, so nobody need have told"


def test_routes_that_are_not_back_with_their_group_are_still_owed():
    memory = remembered(WHOLE, objects((), (), []))
    bare = objects(RAILS, (11, 12, 13), [kernel_group()], routes=())
    memory = restore.remember(memory, [KNOWN], bare, Heard())
    assert list(restore.restoration(memory, bare).routes) == [TARGET]
    memory = restore.remember(memory, [KNOWN], WHOLE, Heard())
    assert not restore.restoration(memory, WHOLE)


def test_what_a_daemon_made_is_left_to_it():
    theirs = replace(
        objects(groups=[kernel_group(protocol=ZEBRA)]), nexthops={n: nexthop(n, protocol=ZEBRA) for n in (11, 12, 13)}
    )
    memory = remembered(theirs, objects((), (), []))
    assert not restore.restoration(memory, objects(RAILS, (), []))


def test_where_news_was_missed_only_a_link_that_is_down_explains_a_loss():
    gone = objects(RAILS, (12, 13), [kernel_group((12, 13))])
    assert 11 not in restore.remember(remembered(WHOLE), [KNOWN], gone, Heard(missed=True)).nexthops
    down = objects((2, 3), (12, 13), [kernel_group((12, 13))])
    assert restore.remember(remembered(WHOLE), [KNOWN], down, Heard(missed=True)).nexthops[11].lost


def test_where_news_was_missed_a_link_that_was_away_meanwhile_explains_a_loss_too():
    flapped = objects(RAILS, (12, 13), [kernel_group((12, 13))], flapped=(1,))
    memory = restore.remember(remembered(WHOLE), [KNOWN], flapped, Heard(missed=True))
    assert list(restore.restoration(memory, flapped).nexthops) == [11]
    other = objects(RAILS, (12, 13), [kernel_group((12, 13))], flapped=(2,))
    assert 11 not in restore.remember(remembered(WHOLE), [KNOWN], other, Heard(missed=True)).nexthops


def test_where_news_was_missed_a_group_that_is_gone_with_its_nexthops_was_deleted_unless_links_went():
    gone = objects(RAILS, (), [])
    assert restore.remember(remembered(WHOLE), [KNOWN], gone, Heard(missed=True)).lost == {}
    flapped = objects(RAILS, (), [], flapped=RAILS)
    memory = restore.remember(remembered(WHOLE), [KNOWN], flapped, Heard(missed=True))
    assert members_of(restore.restoration(memory, flapped).groups[TARGET]) == [11, 12, 13]


def test_a_route_that_somebody_deleted_before_its_group_went_stays_deleted():
    both = objects(routes=[group_route(), group_route("10.9.1.0/24")])
    by_hand = Heard(routes=frozenset({(254, "10.9.1.0/24", 0)}))
    nothing = objects((), (), [])
    memory = restore.remember(remembered(both), [KNOWN], nothing, by_hand)
    assert [route.destination for route in memory.groups[TARGET].routes] == ["10.9.0.0/24"]
    memory = restore.remember(remembered(both, nothing), [KNOWN], nothing, by_hand)
    assert [route.destination for route in memory.groups[TARGET].routes] == ["10.9.0.0/24"]


def test_what_is_not_steered_any_more_is_not_inherited():
    memory = remembered(WHOLE)
    assert memory.narrowed(lambda first: first.target == TARGET) == memory
    left = memory.narrowed(lambda _: False)
    assert (left.nexthops, left.groups, left.lost) == ({}, {}, {})


def test_what_could_not_be_written_is_written_the_next_time(tmp_path):
    folder = tmp_path / "later"
    file = MemoryFile(folder, "here")
    file.save(remembered(WHOLE), 0)
    folder.mkdir()
    file.save(remembered(WHOLE), 1)
    assert MemoryFile(folder, "here").load() == remembered(WHOLE)


def test_what_is_not_ours_to_keep_any_more_is_forgotten():
    memory = restore.remember(remembered(WHOLE), [], WHOLE, Heard())
    assert memory == Memory()


# ---- a route of several hops ----


def several_hops(rails=(1, 2), protocol=0):
    body = with_hops(routes_request(4, 254), [hop_of(f"10.{rail}.1.1", 100 + rail, 4) for rail in rails])
    return route_of(body[:5] + bytes([protocol]) + body[6:])


def as_target(route, rails=(1, 2)):
    members = tuple(hop_member(f"10.{rail}.1.1", f"rail{rail}", 1) for rail in rails)
    return Group(
        "multipath:main:0.0.0.0/0",
        ("0.0.0.0/0",),
        members,
        weights_of((m.nexthop_id, 1) for m in members),
        origin=route.body.hex(),
    )


def test_a_route_is_kept_as_it_is_steered_and_not_as_a_predecessor_knew_it():
    route, wider = several_hops(), several_hops(RAILS)
    memory = restore.remember(Memory(), [as_target(route)], objects(groups=(), nexthops=(), routes=[route]), Heard())
    there = objects(groups=(), nexthops=(), routes=[wider])
    memory = restore.remember(memory, [as_target(wider, RAILS)], there, Heard(missed=True))
    assert len(wanted(memory, there, Ids()).nexthops) == 3
    gone = objects((2, 3), (), ())
    memory = restore.remember(memory, [as_target(wider, RAILS)], gone, Heard())
    (body,) = restore.restoration(memory, gone).routes[as_target(wider, RAILS).target]
    assert [hop.gateway for hop in route_of(body).hops] == ["10.2.1.1", "10.3.1.1"]


def test_a_route_that_went_with_its_last_interface_is_made_over_what_is_up():
    route = several_hops()
    first = as_target(route)
    there = objects(groups=(), nexthops=(), routes=[route])
    memory = restore.remember(Memory(), [first], there, Heard())
    gone = objects((2,), (), ())
    memory = restore.remember(memory, [first], gone, Heard())
    assert list(memory.lost) == [first.target]
    (body,) = restore.restoration(memory, gone).routes[first.target]
    assert [hop.gateway for hop in route_of(body).hops] == ["10.2.1.1"]
    assert not restore.restoration(memory, objects((), (), ()))
    by_hand = Heard(routes=frozenset({(254, "0.0.0.0/0", 0)}))
    assert restore.remember(restore.remember(Memory(), [first], there, Heard()), [first], gone, by_hand).routes == {}


# ---- backups ----


def test_a_backup_is_over_every_hop_that_carries_whatever_the_weights():
    ids = Ids()
    drained = objects(RAILS, (11, 12, 13), [kernel_group((12,))])
    want = wanted(remembered(WHOLE, drained), drained, ids)
    (members,) = want.groups.values()
    assert len(members) == 3 and set(want.nexthops) == set(members)
    assert not set(members) & {11, 12, 13}, "its own, never anybody's"
    down = objects((2, 3), (12, 13), [kernel_group((12, 13))])
    (fewer,) = wanted(remembered(WHOLE, down), down, ids).groups.values()
    assert set(fewer) < set(members)
    assert wanted(remembered(WHOLE), WHOLE, ids) == wanted(remembered(WHOLE), WHOLE, ids)


def test_without_a_link_there_is_no_backup_and_with_the_group_lost_there_still_is():
    nothing = objects((), (), [])
    assert not wanted(remembered(WHOLE, nothing), nothing, Ids()).groups
    lost = objects((1, 3), (11, 13), [])
    want = wanted(remembered(WHOLE, lost), lost, Ids())
    assert [route for route, _ in want.routes] == ["10.9.0.0/24"]


def test_what_a_daemon_took_back_has_no_backup():
    zebras = objects(groups=[kernel_group(protocol=ZEBRA)])
    memory = remembered(zebras)
    assert wanted(memory, zebras, Ids()).routes
    lost = objects((1, 2, 3), (), [])
    assert not wanted(restore.remember(memory, [KNOWN], lost, Heard()), lost, Ids()).routes
    mixed = objects(routes=[group_route(), group_route("10.9.1.0/24", protocol=ZEBRA)])
    lost = objects((1, 3), (11, 13), [])
    want = wanted(restore.remember(remembered(mixed), [KNOWN], lost, Heard()), lost, Ids())
    assert [prefix for prefix, _ in want.routes] == ["10.9.0.0/24"]
    route = several_hops(protocol=ZEBRA)
    first, there = as_target(route), objects(groups=(), nexthops=(), routes=[route])
    memory = restore.remember(Memory(), [first], there, Heard())
    assert wanted(memory, there, Ids()).routes
    lost = objects(RAILS, (), ())
    assert not wanted(restore.remember(memory, [first], lost, Heard()), lost, Ids()).routes


def test_two_targets_for_one_prefix_have_one_backup_that_of_the_better_metric():
    other = replace(KNOWN, target="nexthop_group:103")
    second = replace(kernel_group(), id=103)
    routes = [group_route(metric=60), group_route(number=103, metric=50)]
    found = objects(groups=[kernel_group(), second], routes=routes)
    memory = restore.remember(Memory(), [KNOWN, other], found, Heard())
    want = wanted(memory, found, Ids())
    assert [(prefix, route.nexthop_id) for (prefix, _), route in want.routes.items()] == [("10.9.0.0/24", 103)]


def test_a_hop_that_encapsulates_is_in_no_backup():
    plain, tunnel = (hop_of(f"10.{rail}.1.1", 100 + rail, 4) for rail in (1, 2))
    tunnel = replace(tunnel, body=tunnel.body + attribute(22, attribute(1, bytes(8))))
    route = route_of(with_hops(routes_request(4, 254), [plain, tunnel]))
    there = objects(groups=(), nexthops=(), routes=[route])
    memory = restore.remember(Memory(), [as_target(route)], there, Heard())
    (body,) = wanted(memory, there, Ids()).nexthops.values()
    assert dict(attributes(body, 8))[5] == (101).to_bytes(4, "little")


# ---- whatever happens ----


class MadeUp:
    """A kernel with three rails and a group, as far as links and nexthops go."""

    def __init__(self):
        self.up = set(RAILS)
        self.nexthops = {10 + rail: rail for rail in RAILS}  # id -> the rail it leads over
        self.members = {11, 12, 13}  # None: there is no group
        self.route = True
        self.told = Heard()

    def objects(self):
        groups = [] if self.members is None else [kernel_group(sorted(self.members))]
        routes = [group_route()] if self.members is not None and self.route else []
        return replace(
            objects(self.up, (), groups, routes),
            nexthops={number: nexthop(number, rail) for number, rail in self.nexthops.items()},
        )

    def take_link(self, rail):
        self.up.discard(rail)
        for number in [number for number, by in self.nexthops.items() if by == rail]:
            self._drop(number)

    def delete(self, number):
        self.told = self.told.then(Heard(True, nexthops=frozenset({number})))
        if number != GROUP:
            had = self.members is not None
            self._drop(number)
            gone = had and self.members is None
        else:
            self.members, gone = None, True
            self.route = False
        if gone:
            self.told = self.told.then(Heard(True, nexthops=frozenset({GROUP})))

    def _drop(self, number):
        self.nexthops.pop(number, None)
        if self.members is not None:
            self.members.discard(number)
            if not self.members:
                self.members, self.route = None, False

    def make(self, want):
        for number, body in want.nexthops.items():
            assert number not in self.nexthops, "nothing takes another's place"
            assert dict(attributes(body, 8)) == dict(attributes(nexthop(number).body, 8))
            assert number - 10 in self.up
            self.nexthops[number] = number - 10
        for body in want.groups.values():
            assert self.members is None
            self.members = set(members_of(body))
            assert self.members and self.members <= self.nexthops.keys()
        for _ in want.routes:
            assert self.members is not None
            self.route = True


class Links(RuleBasedStateMachine):
    """Each nexthop is whole, taken by the kernel, or a person's business."""

    def __init__(self):
        super().__init__()
        self.kernel = MadeUp()
        self.memory = Memory()
        self.persons = set()  # ids that are a person's business now
        self.doubtful = set()  # what went while news was missed: nobody can know
        self.missed = False
        self.read()

    @rule(rail=st.sampled_from(RAILS))
    def link_goes(self, rail):
        self.kernel.take_link(rail)

    @rule(rail=st.sampled_from(RAILS))
    def link_comes(self, rail):
        self.kernel.up.add(rail)

    @rule(number=st.sampled_from([11, 12, 13]))
    def somebody_deletes_a_nexthop(self, number):
        if number in self.kernel.nexthops:
            had = self.kernel.members is not None
            self.kernel.delete(number)
            self.persons.add(number)
            if had and self.kernel.members is None:
                self.persons.add(GROUP)

    @rule(number=st.sampled_from([11, 12, 13]))
    def somebody_makes_another_in_its_place(self, number):
        other = next((rail for rail in RAILS if rail in self.kernel.up and rail != number - 10), None)
        if number not in self.kernel.nexthops and other is not None:
            self.kernel.nexthops[number] = other
            self.kernel.told = self.kernel.told.then(Heard(True, made=frozenset({number})))
            self.persons.add(number)
            self.read()  # before it is gone again

    @precondition(lambda self: self.kernel.members is not None)
    @rule()
    def somebody_deletes_the_group(self):
        self.kernel.delete(GROUP)
        self.persons.add(GROUP)

    @rule()
    def news_is_missed(self):
        unheard = self.kernel.told.nexthops  # if their link goes before the next look, nobody can tell who it was
        self.persons -= unheard
        self.doubtful |= unheard
        self.missed = True
        self.kernel.told = Heard(True, missed=True)

    @rule()
    def read(self):
        """As the keeper does: look, take note, make again, look again."""
        heard, self.kernel.told = self.kernel.told, Heard()
        found = self.kernel.objects()
        if self.missed:
            absent = {11, 12, 13, GROUP} - self.kernel.nexthops.keys() - ({GROUP} if self.kernel.members else set())
            self.doubtful |= absent
        self.missed = False
        self.memory = restore.remember(self.memory, [KNOWN], found, heard)
        self.kernel.make(restore.restoration(self.memory, found))
        self.memory = restore.remember(self.memory, [KNOWN], self.kernel.objects(), Heard())

    @rule()
    def all_links_are_back(self):
        self.kernel.up = set(RAILS)
        self.read()
        surely = {11, 12, 13, GROUP} - self.persons - self.doubtful
        assert surely - {GROUP} <= self.kernel.nexthops.keys()
        if GROUP in surely and any(self.kernel.nexthops.get(n) == n - 10 for n in (11, 12, 13)):
            assert self.kernel.members and self.kernel.route
        self.doubtful -= self.kernel.nexthops.keys() | ({GROUP} if self.kernel.members else set())

    @invariant()
    def what_a_person_did_stays_done(self):
        for number in self.persons - {GROUP}:
            assert self.kernel.nexthops.get(number) != number - 10
        if GROUP in self.persons:
            assert self.kernel.members is None


Links.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestLinks = Links.TestCase
