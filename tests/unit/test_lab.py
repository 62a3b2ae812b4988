"""The lab without namespaces: what it refuses before it touches anything, its plan, its bursts and its clocks."""

from __future__ import annotations

import ipaddress
import itertools
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytools import config
from pytools.errors import CapabilityError, UsageError
from pytools.lab import Lab, building, bursts, cli, clocks, delay_line, faults, load, timekeeping, topology, wiring
from pytools.lab.clocks import Step, VirtualClock, Wander, draw, offset_between
from pytools.lab.topology import Spec, lab_of_namespace, namespace_pattern, parse_rate, rate_text


def refused(*words):
    result = CliRunner().invoke(cli.lab, list(words))
    assert result.exception is not None, result.output
    return result.exception


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["up", "--name", "../x"], "is not a name for a lab"),
        (["up", "--hosts", "1"], "hosts is 1"),
        (["up", "--rate", "fast"], "is not a rate"),
        (["show", "--name", "not-there"], "there is no lab not-there"),
        (["congest", "--rail", "1"], "nothing to change"),
        (["congest", "--rail", "1", "--rate", "1mbit", "--toward", "two"], "'two' is not a host"),
        (["blackhole", "--rail", "1", "--name", "not-there"], "there is no lab not-there"),
        (["up", "--share", "h1,h2"], "all hosts share one clock"),
        (["up", "--clocks", "1", "--share", "h1,two"], "'two' is not a host"),
        (["up", "--clocks", "1", "--share", "h1,h9"], "cannot share oscillators"),
        (["up", "--clocks", "-1"], "seed is -1"),
        (["clock", "--host", "h1"], "a host and a size"),
        (["clock", "--step", "1ms"], "a host and a size"),
        (["clock", "--name", "not-there"], "there is no lab not-there"),
        (["delay", "--rail", "1", "--direction", "h1", "--us", "5"], "'h1' is not a direction"),
        (["bursts", "--rail", "1", "--share", "0.4", "--name", "not-there"], "there is no lab not-there"),
        (["mark", "--rail", "1", "--name", "not-there"], "there is no lab not-there"),
        (["mtu", "--rail", "1", "--bytes", "1400", "--name", "not-there"], "there is no lab not-there"),
        (["cut", "--rail", "1", "--name", "not-there"], "there is no lab not-there"),
        (["cut", "--rail", "1", "--host", "two"], "'two' is not a host"),
        (["kill-host", "--host", "two"], "'two' is not a host"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_to_do(words, says):
    error = refused(*words)
    assert isinstance(error, UsageError)
    assert says in error.what
    assert error.next_step


@pytest.mark.parametrize("text", ["h1", "h1:x", "h0:h1", ":"])
def test_a_direction_is_two_hosts(text):
    with pytest.raises(UsageError):
        cli.direction_of(text)


def test_a_direction_is_read():
    assert cli.direction_of("h1:h12") == (1, 12)
    assert cli.direction_of("3:4") == (3, 4)


@pytest.mark.parametrize("every", [0, -1, 1_000_001])
def test_marks_are_of_every_so_manieth(every):
    with pytest.raises(UsageError, match="out of range"):
        faults.mark(Spec("x"), 1, every, None)


@pytest.mark.parametrize("mtu_bytes", [0, 1279, 65_536])
@pytest.mark.parametrize("silent", [False, True])
def test_an_mtu_is_one_that_both_families_can_have(mtu_bytes, silent):
    with pytest.raises(UsageError, match="out of range"):
        faults.narrow(Spec("x"), 1, mtu_bytes, silent, None)


def test_without_root_nothing_is_begun(monkeypatch, tmp_path):
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(building.os, "geteuid", lambda: 1000)
    with pytest.raises(CapabilityError, match="run as root"):
        Lab.up("x")
    assert not (tmp_path / "run").exists()


# ---- topology ----


def all_addresses(spec):
    hosts, rails = spec.topology
    for host in hosts:
        yield from (host.service, host.service6)
        for each in host.interfaces:
            yield from (each.address, each.address6)
    ways = [way for rail in rails for way in rail.inner]
    for port in itertools.chain.from_iterable(each.ports for each in (*rails, *ways)):
        yield from (port.address, port.address6)


def test_the_addresses_are_those_that_were_agreed():
    hosts, rails = Spec("x", hosts=3, rails=2).topology
    assert hosts[2].service == "10.9.0.3"
    assert hosts[2].service6 == "fd00:9::3"
    assert hosts[2].netns == "swerve-x-h3"
    second = hosts[2].interfaces[1]
    assert (second.name, second.address, second.gateway) == ("rail2", "10.2.3.2", "10.2.3.1")
    assert (second.address6, second.gateway6) == ("fd00:2:3::2", "fd00:2:3::1")
    assert (second.nexthop_id, second.nexthop6_id) == (12, 22)
    assert rails[1].netns == "swerve-x-r2"
    assert [port.name for port in rails[1].ports] == ["h1", "h2", "h3"]
    assert (topology.group_id(3, 4), topology.group_id(3, 6)) == (103, 203)


def test_the_largest_lab_has_no_address_or_identifier_twice():
    spec = Spec("x", hosts=topology.MAX_HOSTS, rails=topology.MAX_RAILS, inner=topology.MAX_INNER)
    addresses = [ipaddress.ip_address(each) for each in all_addresses(spec)]
    assert len(addresses) == len(set(addresses))
    hosts, rails = spec.topology
    identifiers = [each.nexthop_id for each in hosts[0].interfaces]
    identifiers += [each.nexthop6_id for each in hosts[0].interfaces]
    identifiers += [topology.group_id(host.number, family) for host in hosts for family in (4, 6)]
    assert len(identifiers) == len(set(identifiers))
    ends = {each.index for host in hosts for each in host.interfaces}
    assert ends.isdisjoint(port.index for rail in rails for port in rail.ports)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": 1},
        {"hosts": 100},
        {"rails": 0},
        {"rails": 9},
        {"inner": 1},
        {"inner": 9},
        {"rate_bit_s": 1},
        {"queue_bytes": 100},
        {"name": ""},
        {"name": "../x"},
        {"name": "x" * 33},
    ],
)
def test_a_lab_that_does_not_fit_is_refused(wrong):
    with pytest.raises(UsageError):
        Spec(**{"name": "x", **wrong})


@given(st.integers(10_000, 400 * 10**9))
def test_a_rate_is_read_back_as_it_was_written(rate):
    assert parse_rate(rate_text(rate)) == rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 10**8), ("1.5Gbit", 15 * 10**8), ("800kbit", 800_000), ("12000bit", 12_000), ("none", None)],
)
def test_rates_as_people_write_them(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "100", "100mbps", "-1mbit", "3zbit"])
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="100mbit"):
        parse_rate(text)


def test_the_namespaces_of_one_lab_are_not_those_of_another():
    ours = namespace_pattern("a")
    assert ours.fullmatch("swerve-a-h1")
    assert ours.fullmatch("swerve-a-r8")
    assert ours.fullmatch("swerve-a-r8w8")
    for other in ("swerve-a-h1-h1", "swerve-ab-h1", "swerve-b-h1", "swerve-a-x1", "swerve-a-h1x", "a-h1"):
        assert not ours.fullmatch(other), other
    assert lab_of_namespace("swerve-a-h1-h1") == "a-h1"
    assert lab_of_namespace("swerve-a-r1-r1w2") == "a-r1"
    assert lab_of_namespace("something") is None


def test_the_bucket_holds_a_millisecond_and_never_less_than_two_frames():
    assert wiring.burst_bytes(100_000_000) == 12_500
    assert wiring.burst_bytes(10_000) == 2 * 1514


@pytest.mark.parametrize("ipv6", [False, True])
def test_the_agents_configuration_is_valid_and_names_every_other_host(ipv6):
    hosts, _ = Spec("x", hosts=4, ipv6=ipv6).topology
    wanted = config.checked(building.agent_config(hosts[1], hosts, ipv6), "test")
    assert wanted.host == "h2"
    families = [4, 6] if ipv6 else [4]
    expected = [(name, family) for family in families for name in ("h1", "h3", "h4")]
    assert [(peer.name, ipaddress.ip_address(peer.address).version) for peer in wanted.peers] == expected
    assert {peer.clock for peer in wanted.peers} == {"shared"}


@given(st.integers(100_000, 10**10))
def test_a_load_sends_what_was_asked_for_in_short_batches(rate):
    frames, interval = load.batch_frames(rate), load.batch_interval_ns(rate)
    assert 1 <= frames <= 8
    assert frames * 1514 * 8 * 10**9 / interval == pytest.approx(rate, rel=1e-3)


# ---- bursts ----

RATE = 20_000_000


@pytest.mark.parametrize("share", [0.4, 0.9])
def test_bursts_come_to_the_share_towards_every_host(share: float) -> None:
    sent = dict.fromkeys((1, 2, 3), 0)
    last_ns = 0
    for burst in islice(bursts.schedule(3, RATE, share, 5), 60_000):
        sent[burst.destination] += burst.payload_bytes
        last_ns = burst.at_ns
    for payload in sent.values():
        assert payload * 8 * 10**9 / last_ns / RATE == pytest.approx(share * 1448 / 1547, rel=0.1)


@settings(max_examples=20)
@given(st.integers(2, 12), st.integers(0, 2**32), st.integers(1_000_000, 10**9))
def test_bursts_are_in_order_between_two_hosts_that_are_there(hosts: int, seed: int, rate: int) -> None:
    found = list(islice(bursts.schedule(hosts, rate, 0.5, seed), 500))
    assert [each.at_ns for each in found] == sorted(each.at_ns for each in found)
    assert all(each.source != each.destination for each in found)
    assert {each.source for each in found} == {each.destination for each in found} == set(range(1, hosts + 1))
    sizes = [each.payload_bytes for each in found]
    assert min(sizes) >= 1448
    assert max(sizes) > 4 * sorted(sizes)[len(sizes) // 2], "the tail is heavy"
    assert found == list(islice(bursts.schedule(hosts, rate, 0.5, seed), 500))


def test_the_mean_is_that_of_the_sizes_drawn() -> None:
    sizes = [each.payload_bytes for each in islice(bursts.schedule(2, RATE, 0.5, 1), 100_000)]
    assert sum(sizes) / len(sizes) == pytest.approx(min(sizes) * bursts.mean_in_smallest(), rel=0.02)


@pytest.mark.parametrize("share", [0, -0.1, 1, 40, float("nan")])
def test_a_share_that_cannot_be_kept_is_refused(share: float) -> None:
    with pytest.raises(UsageError) as caught:
        bursts.check_share(share)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("rail", "source", "destination", "extra_us"),
    [(3, 1, 2, 10), (1, 1, 1, 10), (1, 1, 9, 10), (1, 1, 2, 0), (1, 1, 2, 2_000_000), (1, 1, 2, float("nan"))],
)
def test_a_longer_way_that_cannot_be_is_refused_before_anything_is_made(
    rail: int, source: int, destination: int, extra_us: float
) -> None:
    with pytest.raises(UsageError) as caught:
        faults.longer_way(Spec("not-there", hosts=3), rail, source, destination, extra_us)
    assert caught.value.next_step


# ---- clocks ----

SECOND = 10**9

ORIGIN = 5_000 * SECOND

END = ORIGIN + clocks.KNOTS * 2**30

wanders = st.builds(
    Wander,
    amplitude_ppb=st.floats(0, 5_000),
    period_s=st.floats(10, 10_000),
    walk_ppb=st.floats(0, 100),
    seed=st.integers(0, 2**32),
)

instants = st.integers(0, END + 100 * SECOND)


@st.composite
def virtual_clocks(draw_from: st.DrawFn) -> VirtualClock:
    times = sorted(draw_from(st.sets(st.integers(0, END // (2 * SECOND)), max_size=4)))
    sizes = st.integers(-clocks.MAX_STEP_NS, clocks.MAX_STEP_NS)
    return VirtualClock(
        offset_ns=draw_from(st.integers(-SECOND, SECOND)),
        drift_ppb=draw_from(st.floats(-50_000, 50_000)),
        wander=draw_from(wanders),
        origin_ns=draw_from(st.integers(0, 2 * ORIGIN)),
        steps=tuple(Step(2 * SECOND * each, draw_from(sizes)) for each in times),
    )


def as_the_kernel_does(clock: VirtualClock, loaded_ns: int, now: int) -> int:
    """bpf/lib/clock.h, line by line, on what was loaded at one moment; Python's integers neither wrap nor round."""
    knots = [int(knot) for knot in clock.knots()]
    offset, step = clock.loaded_at(loaded_ns)
    age = now - clock.origin_ns
    knot = age >> 30
    if now < clock.origin_ns:
        ahead = knots[0]
    elif knot >= 4095:
        ahead = knots[4095]
    else:
        ahead = knots[knot] + ((knots[knot + 1] - knots[knot]) * (age & (2**30 - 1)) >> 30)
    if now >= step.at_ns:
        ahead += step.step_ns
    return now + offset + ahead


@given(virtual_clocks(), instants)
@example(VirtualClock(drift_ppb=-50_000, origin_ns=ORIGIN), ORIGIN - 1)
@example(VirtualClock(drift_ppb=-50_000, origin_ns=ORIGIN), ORIGIN + 1)
@example(VirtualClock(drift_ppb=50_000, origin_ns=ORIGIN), END - 2**30 - 1)
@example(VirtualClock(drift_ppb=50_000, origin_ns=ORIGIN), END)
def test_a_clock_shows_what_the_kernel_computes(clock: VirtualClock, now_ns: int) -> None:
    assert int(clock.at(now_ns)) == as_the_kernel_does(clock, now_ns, now_ns)


@given(virtual_clocks(), instants, st.integers(0, SECOND))
def test_what_was_loaded_before_a_step_holds_until_long_after_it(
    clock: VirtualClock, loaded_ns: int, later_ns: int
) -> None:
    """The agent has a second or more, the least time between steps, to load the next one."""
    now_ns = loaded_ns + later_ns
    assert int(clock.at(now_ns)) == as_the_kernel_does(clock, loaded_ns, now_ns)


@given(virtual_clocks(), st.lists(instants, min_size=1, max_size=20))
def test_many_instants_at_once_give_what_each_gives_alone(clock: VirtualClock, at_ns: list[int]) -> None:
    assert clock.at(at_ns).tolist() == [int(clock.at(each)) for each in at_ns]
    assert clock.at(at_ns).dtype == np.int64


@given(virtual_clocks(), instants)
def test_the_way_back_is_the_instant_of_the_time_shown(clock: VirtualClock, now_ns: int) -> None:
    shown = int(clock.at(now_ns))
    back = int(clock.when(shown))
    if back == now_ns:
        return
    at_a_step = any(step.at_ns in (back, now_ns) for step in clock.steps)
    assert at_a_step or abs(int(clock.at(back)) - shown) <= 1
    assert back >= now_ns - 2, "of a time shown twice, the later instant is meant"


def test_the_way_back_across_steps() -> None:
    forward = VirtualClock(steps=(Step(ORIGIN, 1000),))
    assert forward.when([ORIGIN - 1, ORIGIN, ORIGIN + 999, ORIGIN + 1000]).tolist() == [
        *(ORIGIN - 1, ORIGIN, ORIGIN, ORIGIN)
    ]
    back = VirtualClock(steps=(Step(ORIGIN, -1000),))
    assert back.when([ORIGIN - 1001, ORIGIN - 1000, ORIGIN - 1]).tolist() == [ORIGIN - 1001, ORIGIN, ORIGIN + 999]


def test_drift_is_what_a_clock_gains() -> None:
    clock = VirtualClock(drift_ppb=30_000, origin_ns=ORIGIN)
    assert int(clock.at(ORIGIN + 1000 * SECOND)) - ORIGIN - 1000 * SECOND == pytest.approx(30_000_000, abs=2)
    assert clock.drift_at([ORIGIN - 1, ORIGIN, ORIGIN + 500 * SECOND]) == pytest.approx([0, 30_000, 30_000], abs=1)
    assert clock.drift_at(END + SECOND) == 0


def test_drawn_clocks_wander_within_the_stated_limits() -> None:
    for clock in draw(40, 7, ORIGIN):
        gained = np.diff(clock.knots()) / (2**30 / SECOND) - clock.drift_ppb
        assert 250 < np.abs(gained).max() < 650
        changes = np.abs(np.diff(gained)) / (2**30 / SECOND)
        rounding = 2.0  # knots are whole nanoseconds
        assert 5 < np.quantile(changes, 0.99) < 10 + rounding
        assert changes.max() < 12 + rounding


def test_a_seed_draws_the_same_clocks_again_and_another_seed_others() -> None:
    assert draw(5, 1, ORIGIN) == draw(5, 1, ORIGIN)
    assert draw(5, 1, ORIGIN) != draw(5, 2, ORIGIN)
    drawn = draw(200, 3, ORIGIN)
    assert len({clock.offset_ns for clock in drawn}) == 200
    assert max(abs(clock.offset_ns) for clock in drawn) > 900_000_000
    assert 29_000 < max(abs(clock.drift_ppb) for clock in drawn) <= 30_000


def test_hosts_that_share_an_oscillator_keep_their_distance_and_others_do_not() -> None:
    first, second, third, fourth = draw(4, 1, ORIGIN, shared=[[1, 3], [2]])
    times = ORIGIN + np.arange(0, 3600, 10) * SECOND
    assert len(set(offset_between(first, third, times).tolist())) == 1
    for one, other in ((first, second), (first, fourth), (second, fourth)):
        assert len(set(offset_between(one, other, times).tolist())) > 300
    assert first.offset_ns != third.offset_ns


@pytest.mark.parametrize("shared", [[[1, 1]], [[1, 2], [2, 3]], [[0, 1]], [[1, 5]]])
def test_a_host_that_is_not_there_or_shares_twice_is_refused(shared: list[list[int]]) -> None:
    with pytest.raises(UsageError) as caught:
        draw(4, 1, ORIGIN, shared)
    assert caught.value.next_step


@given(virtual_clocks(), virtual_clocks(), instants)
def test_swapping_two_clocks_flips_their_offset(a: VirtualClock, b: VirtualClock, now_ns: int) -> None:
    assert int(offset_between(a, b, now_ns)) == -int(offset_between(b, a, now_ns))
    assert int(offset_between(a, b, now_ns)) == int(b.at(now_ns)) - int(a.at(now_ns))


@pytest.mark.parametrize(
    "make",
    [
        lambda: VirtualClock(offset_ns=SECOND + 1),
        lambda: VirtualClock(offset_ns=-SECOND - 1),
        lambda: VirtualClock(drift_ppb=50_001),
        lambda: VirtualClock(drift_ppb=float("nan")),
        lambda: VirtualClock(origin_ns=-1),
        lambda: Wander(amplitude_ppb=-1),
        lambda: Wander(period_s=0),
        lambda: Wander(walk_ppb=float("inf")),
        lambda: Wander(seed=-1),
        lambda: Step(ORIGIN, clocks.MAX_STEP_NS + 1),
        lambda: Step(-1, 0),
        lambda: VirtualClock(steps=(Step(ORIGIN, 1), Step(ORIGIN + SECOND - 1, 1))),
        lambda: VirtualClock(steps=(Step(ORIGIN, 1), Step(ORIGIN - 2 * SECOND, 1))),
        lambda: VirtualClock().stepped(ORIGIN, 1).stepped(ORIGIN, 1),
        lambda: draw(2, -1, ORIGIN),
    ],
)
def test_what_does_not_fit_is_refused_with_a_next_step(make: object) -> None:
    with pytest.raises(UsageError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.next_step


@given(virtual_clocks())
def test_a_clock_survives_its_file(tmp_path_factory: pytest.TempPathFactory, clock: VirtualClock) -> None:
    path = tmp_path_factory.mktemp("clock") / clocks.FILE
    clocks.save(clock, path)
    assert clocks.load(path) == clock
    assert [each.name for each in path.parent.iterdir()] == [clocks.FILE]


@pytest.mark.parametrize("text", ["", "{", '{"offset_ns": "x"}', '{"colour": 1}', '{"drift_ppb": 1e6}', "[]"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / clocks.FILE
    path.write_text(text)
    with pytest.raises(UsageError):
        clocks.load(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / clocks.FILE
    clocks.save(VirtualClock(offset_ns=1), path)

    def fails(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no"):
        clocks.save(VirtualClock(offset_ns=2), path)
    assert clocks.load(path).offset_ns == 1
    assert [each.name for each in tmp_path.iterdir()] == [clocks.FILE]


def test_a_step_is_announced_ahead_of_its_time_and_never_too_close_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    host = Spec("x").topology[0][1]
    with pytest.raises(UsageError, match="no clock of its own"):
        timekeeping.step(host, 1)
    timekeeping.file_of(host).parent.mkdir()
    clocks.save(VirtualClock(), timekeeping.file_of(host))
    monkeypatch.setattr(timekeeping.time, "monotonic_ns", lambda: ORIGIN)
    first = timekeeping.step(host, 10_000_000)
    second = timekeeping.step(host, -5)
    assert first >= ORIGIN + SECOND // 10
    assert second >= first + clocks.STEP_APART_NS
    assert timekeeping.clock_of(host).steps == (Step(first, 10_000_000), Step(second, -5))


def test_the_truth_is_shown_against_the_first_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    hosts = Spec("x", hosts=2).topology[0]
    for host, clock in zip(hosts, draw(2, 4, ORIGIN), strict=True):
        timekeeping.file_of(host).parent.mkdir()
        clocks.save(clock, timekeeping.file_of(host))
    monkeypatch.setattr(timekeeping.time, "monotonic_ns", lambda: ORIGIN + 100 * SECOND)
    shown = timekeeping.show(hosts)
    a, b = draw(2, 4, ORIGIN)
    assert shown["clocks"][0]["offset_ns"] == 0
    assert shown["clocks"][1]["offset_ns"] == int(offset_between(a, b, ORIGIN + 100 * SECOND))
    assert shown["clocks"][1]["drift_ppb"] == pytest.approx(b.drift_ppb - a.drift_ppb, abs=1000)
    assert msgspec.json.decode(msgspec.json.encode(shown)) == shown


@pytest.mark.parametrize(
    ("text", "ns"), [("10ms", 10_000_000), ("-250us", -250_000), ("1.5s", 1_500_000_000), ("7ns", 7)]
)
def test_durations_are_read(text: str, ns: int) -> None:
    assert timekeeping.parse_shift(text) == ns


@pytest.mark.parametrize("text", ["", "10", "ms", "1 ms", "1e3ns", "one"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        timekeeping.parse_shift(text)


def test_there_must_be_a_clock_for_each_host() -> None:
    with pytest.raises(UsageError, match="1 clocks for 2 hosts"):
        timekeeping.wanted(2, [VirtualClock()])
    assert timekeeping.wanted(2, None) is None
    assert len(timekeeping.wanted(3, 7) or []) == 3


def test_a_longer_way_holds_neighbours_for_other_times_and_all_within_the_spread() -> None:
    held = list(islice(delay_line.times(9_000_000, 300_000), 8))
    assert all(9_000_000 <= each < 9_300_000 for each in held)
    assert max(np.diff([9_000_000, *sorted(held), 9_300_000])) < 2 * 300_000 / len(held), "a few of them cover it"
    assert set(islice(delay_line.times(9_000_000, 0), 8)) == {9_000_000}
