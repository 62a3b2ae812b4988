"""What the live view remembers of paths: horizons, counts, and how little it keeps."""

from __future__ import annotations

import msgspec
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from samples import AT_NS, SECOND_NS
from top_kit import NOW_NS, known, lines, story

from pytools.figures import ONE_WAY, Figure
from pytools.signals import DELAY_BOUNDS_NS, Delay, Histogram, PathDelay, PathState, encode
from pytools.views.top import paths
from pytools.views.top.glyphs import UNICODE
from pytools.views.top.rings import LONGEST_S, WINDOWS, Ring, figures, queued, trend
from pytools.views.top.state import EVENTS, Known

P50, P99 = Figure(ONE_WAY, "p50"), Figure(ONE_WAY, "p99")


def test_a_line_in_another_order_is_decoded_like_any_other() -> None:
    fields = msgspec.json.decode(encode(samples.path_delay()))
    shuffled = msgspec.json.encode({name: fields[name] for name in sorted(fields, reverse=True)})
    about = Known()
    about.take([shuffled])
    assert about.model.of(PathDelay)[samples.path()] == samples.path_delay() and about.malformed == 0


def test_what_is_no_signal_is_counted() -> None:
    about = Known()
    about.take([b"{", b'{"type":"path_delay"}', b"\xff", encode(samples.act())])
    assert about.malformed == 3 and len(about.events) == 1


def test_short_windows_are_left_out_where_there_are_long_ones() -> None:
    about = Known()
    about.take(lines([samples.path_delay()]))
    about.take(lines([samples.path_delay(1, AT_NS + each, window_ns=80_000_000) for each in range(1, 100)]))
    assert [each.window_ns for each in about.rings[samples.path()].windows] == [SECOND_NS]


def test_short_windows_are_shown_until_a_long_one_comes_and_when_none_comes_any_more() -> None:
    about = known(samples.path_delay(window_ns=80_000_000))
    ring = about.rings[samples.path()]
    assert [each.window_ns for each in ring.windows] == [80_000_000]
    about.take(lines([samples.path_delay(at_ns=AT_NS + SECOND_NS)]))
    assert [each.window_ns for each in ring.windows] == [SECOND_NS]
    for tick in range(2, 50):  # the agent was configured anew
        about.take(lines([samples.path_delay(at_ns=AT_NS + tick * SECOND_NS // 5, window_ns=SECOND_NS // 5)]))
    assert ring.windows[-1].at_ns == AT_NS + 49 * SECOND_NS // 5


@given(
    st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(0, 50), st.integers(0, 50)),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from((2, 10, 40)),
)
def test_figures_are_those_of_the_windows_in_the_horizon(rows: list[tuple[int, int, int, int]], horizon_s: int) -> None:
    ring, kept = Ring(), []
    for index, (one, other, received, lost) in enumerate(rows):
        p50, p99 = min(one, other), max(one, other)
        way = msgspec.structs.replace(samples.path_delay().forward, owd_p50_ns=p50, owd_p99_ns=p99)
        at_ns = AT_NS + index * SECOND_NS
        ring.add(samples.path_delay(at_ns=at_ns, forward=way, received=received, lost=lost))
        kept.append((at_ns, p50, p99, received, lost))
    now_ns = kept[-1][0]
    kept = [each for each in kept if each[0] > now_ns - horizon_s * SECOND_NS]
    found = figures(ring, now_ns - horizon_s * SECOND_NS)
    medians = sorted(each[1] for each in kept)
    assert found.windows == len(kept) and found.covered_ns == len(kept) * SECOND_NS
    assert found.forward.figures[P99] == max(each[2] for each in kept)
    assert found.forward.figures[P50] == medians[(len(medians) - 1) // 2]
    assert (found.received, found.lost) == (sum(each[3] for each in kept), sum(each[4] for each in kept))


def test_the_last_window_stands_when_none_is_in_the_horizon() -> None:
    ring = Ring()
    ring.add(samples.path_delay())
    assert figures(ring, AT_NS + 100 * SECOND_NS).forward.figures[P99] == 8_400
    assert not figures(Ring(), 0).forward.figures and figures(Ring(), 0).loss is None


def test_a_ring_holds_forty_seconds_and_never_more_than_so_many_windows() -> None:
    ring = Ring()
    for tick in range(100):
        ring.add(samples.path_delay(at_ns=AT_NS + tick * SECOND_NS))
        ring.add_tcp(samples.tcp_path(at_ns=AT_NS + tick * SECOND_NS))
        ring.add_marks(samples.path_ecn(at_ns=AT_NS + tick * SECOND_NS))
    assert len(ring.windows) == len(ring.tcp) == len(ring.marks) == LONGEST_S
    for tick in range(2 * WINDOWS):
        ring.add(samples.path_delay(at_ns=AT_NS + 200 * SECOND_NS + tick, window_ns=SECOND_NS))
    assert len(ring.windows) == WINDOWS


def test_events_are_bounded_and_links_told_twice_are_one() -> None:
    about = known(*(samples.act(AT_NS + each, each) for each in range(EVENTS + 50)))
    assert len(about.events) == EVENTS
    twice = known(samples.link_event(1), samples.link_event(1))
    assert len(twice.events) == 1
    about = known(samples.link_event(1))
    about.take(lines([samples.link_event(1)]))
    assert len(about.events) == 1


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=len(DELAY_BOUNDS_NS) + 1), max_size=40), st.integers(0, 39))
def test_histograms_of_the_windows_in_the_horizon_add_up(counted: list[list[int]], since: int) -> None:
    ring = Ring()
    for second, counts in enumerate(counted):
        told = Histogram(counts, 0) if counts else None
        way = msgspec.structs.replace(samples.path_delay().forward, queueing_histogram=told)
        ring.add(samples.path_delay(at_ns=AT_NS + second * SECOND_NS, forward=way, reverse=Delay(0)))
    there, back = queued(ring, AT_NS + (since - 1) * SECOND_NS)
    assert there == [
        sum(each[place] for each in counted[since:] if place < len(each)) for place in range(len(DELAY_BOUNDS_NS) + 1)
    ]
    assert not any(back)


def test_a_histogram_of_more_classes_than_are_known_is_shown() -> None:
    many = Histogram([1] * (len(DELAY_BOUNDS_NS) + 3), 0)
    way = msgspec.structs.replace(samples.path_delay().forward, queueing_histogram=many)
    ring = Ring()
    ring.add(samples.path_delay(forward=way, reverse=Delay(0)))
    assert queued(ring, 0) == ([1] * len(DELAY_BOUNDS_NS) + [3], [0] * (len(DELAY_BOUNDS_NS) + 1))


def test_a_trend_has_its_worst_of_each_part_and_blanks() -> None:
    ring = Ring()
    for second in (0, 1, 2, 9):
        way = msgspec.structs.replace(samples.path_delay().forward, queueing_p99_ns=1000 * (second + 1))
        ring.add(samples.path_delay(at_ns=AT_NS + second * SECOND_NS, forward=way))
    assert trend(ring, AT_NS + 9 * SECOND_NS, 10) == [None] * 7 + [3000, None, 10_000]


# ---- acts, states, zero, freeze ----


def test_states_are_told_when_they_change_and_bad_ones_from_the_start() -> None:
    about = known(samples.path_state(1, state="drained"), samples.path_state(2, state="healthy"))
    about.take(lines([samples.path_state(1, AT_NS + 1, "drained"), samples.path_state(2, AT_NS + 1, "suspect")]))
    about.take(lines([samples.path_state(2, AT_NS + 2, "healthy")]))
    assert [event.what for event in about.events] == ["drained", "healthy → suspect", "suspect → healthy"]


def test_an_act_belongs_to_the_paths_that_its_group_carries_or_that_it_names() -> None:
    named = samples.act(number=2, target="overlay:main:10.9.3.0/24", paths=[samples.path(3), samples.path(1)])
    other = samples.act(number=3, target="nexthop_group:999", paths=[samples.path(1, "h3"), samples.path(11)])
    about = known(samples.nexthop_group(), samples.act(number=1), named, other)
    assert [event.signal.act_id for event in about.about(samples.path(1))] == ["a1", "a2"]  # type: ignore[union-attr]
    assert [event.signal.act_id for event in about.about(samples.path(2))] == ["a1"]  # type: ignore[union-attr]


def test_zero_begins_anew_and_forgets_no_event() -> None:
    about = known(*story(), samples.self_cost(AT_NS + 1, drops={"ring_full": 2, "bus_slow": 0}))
    assert about.drops() == {"ring_full": 2}
    events = list(about.events)
    flow = samples.tcp_flow(1, local_port=40_029, segments=29)
    assert about.flow_counts(flow).retransmitted == 29
    about.zero(NOW_NS, missed=7)
    assert list(about.events) == events and about.missed(9) == 2
    assert about.flow_counts(flow) == (0, 0, 0) and about.drops() == {}
    found = figures(about.rings[samples.path(1)], 0)
    assert (found.windows, found.received, found.retransmitted_per_s) == (0, 0, None)
    later = AT_NS + SECOND_NS
    grown = samples.tcp_flow(1, later, 40_029, 31)
    newer = samples.tcp_flow(1, later, 50_000, 4, first_ns=NOW_NS + 1)
    older = samples.tcp_flow(1, later, 50_001, 4)  # began before, is heard of only now
    more = samples.self_cost(later, drops={"ring_full": 5, "bus_slow": 0})
    about.take(lines([grown, newer, older, more, samples.path_delay(1, later)]))
    assert [about.flow_counts(each).retransmitted for each in (grown, newer, older)] == [2, 4, 0]
    assert about.drops() == {"ring_full": 3}
    assert figures(about.rings[samples.path(1)], 0).windows == 1


def test_a_counter_that_began_anew_is_shown_as_it_is() -> None:
    about = known(samples.self_cost(drops={"ring_full": 10}))
    about.zero(NOW_NS, 0)
    about.take(lines([samples.self_cost(AT_NS + SECOND_NS, drops={"ring_full": 4})]))  # the agent was started again
    assert about.drops() == {"ring_full": 4}


def test_what_is_frozen_stays_as_it_was() -> None:
    about = known(*story())
    held = about.frozen()
    before = figures(held.rings[samples.path(1)], 0), list(held.events), held.about(samples.path(1))
    at_ns = AT_NS + SECOND_NS
    about.take(lines([samples.path_delay(1, at_ns), samples.act(at_ns, 9), samples.path_state(1, at_ns, "healthy")]))
    about.take(lines([samples.path_delay(1, at_ns + 1, window_ns=80_000_000)]))
    assert held.model.of(PathState)[samples.path(1)].state == "drained"
    assert (figures(held.rings[samples.path(1)], 0), list(held.events), held.about(samples.path(1))) == before
    assert about.rings[samples.path(1)].windows[-1].at_ns == at_ns > held.rings[samples.path(1)].windows[-1].at_ns
    assert len(about.events) == len(before[1]) + 2


def test_packets_are_counted_between_readings_whatever_comes_together() -> None:
    readings = [
        samples.nexthop_group(AT_NS + each * SECOND_NS, (100 + 10 * each, 900 + 90 * each)) for each in range(4)
    ]
    replaced = samples.nexthop_group(AT_NS + 4 * SECOND_NS, (50, 50))  # the kernel counts afresh
    one, by_one = known(*readings, replaced), Known()
    for each in (*readings, replaced):
        by_one.take(lines([each]))
    for about in (one, by_one):
        shares = about.shares.of(about.model, [samples.path(1), samples.path(9)], 0, {})
        assert list(shares) == [samples.path(1)]
        assert shares[samples.path(1)].sent == pytest.approx((30 + 50) / (300 + 100))
        recent = about.shares.of(about.model, [samples.path(1)], AT_NS + 3 * SECOND_NS, {})
        assert recent[samples.path(1)].sent == pytest.approx(0.5)
    uncounted = known(samples.nexthop_group(packets=(None, None)), samples.nexthop_group(AT_NS + 1, (None, None)))
    assert uncounted.shares.of(uncounted.model, [samples.path(1)], 0, {})[samples.path(1)].sent is None


def test_connections_that_the_kernel_counts_once_are_counted_by_their_segments() -> None:
    """Of connections that were there before, the kernel of this group counts nothing more."""
    still = [samples.nexthop_group(AT_NS + each * SECOND_NS, (3, 0)) for each in range(4)]
    tcp = [
        samples.tcp_path(rail, AT_NS + each * SECOND_NS, destination=to, segments_out=segments)
        for each in range(4)
        for rail, to, segments in ((1, "h2", 100), (2, "h2", 250), (2, "h3", 50))
    ]
    group = msgspec.structs.replace(still[-1], destinations=["10.9.0.0/16"])  # it carries the paths to both
    about = known(*still, group, *tcp)
    assert about.shares.of(about.model, [samples.path(1)], 0, {})[samples.path(1)].sent is None
    found = {row.name: row.share for row in paths.rows(about, NOW_NS + 3 * SECOND_NS, 2, UNICODE).rows}
    assert {name: share.sent for name, share in found.items()} == {"h2 rail1": 0.25, "h2 rail2": 0.75, "h3 rail2": 0.75}
    assert (found["h2 rail1"].segments, found["h2 rail1"].chosen) == (2 * 100, 0), "of the last two seconds"


def test_packets_of_a_horizon_are_those_however_long_it_was_watched_and_whoever_came_and_went() -> None:
    packets, told = [0, 0], []
    for second in range(120):
        packets = [packets[0] + 10, packets[1] + 30]
        reading = samples.nexthop_group(AT_NS + second * SECOND_NS, (packets[0], packets[1]))
        if 100 <= second < 105:  # the second member is out for a while, and is counted afresh then
            reading = msgspec.structs.replace(reading, members=reading.members[:1])
            packets[1] = 0
        told.append(reading)
    about = known(*told)
    for horizon_s, others in ((2, 2 * 30), (10, 10 * 30), (40, 34 * 30)):  # nothing is known of the first after it
        since = AT_NS + (119 - horizon_s) * SECOND_NS
        share = about.shares.of(about.model, [samples.path(1)], since, {})[samples.path(1)]
        assert share.chosen == 10 * horizon_s
        assert share.sent == pytest.approx(10 * horizon_s / (10 * horizon_s + others))
