"""Filters and orders of the views: what passes, what cannot, and that tables and JSON agree."""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from support import mentions

from pytools.errors import UsageError
from pytools.signals import AnySignal, Owner, PacketDrops, RdmaQueuePair, TcpFlow
from pytools.views import filters, query, table_registry
from pytools.views.columns import Column, Listing, little, much, named
from pytools.views.filters import VERDICTS, Filters, chosen, parse
from pytools.views.registry import VIEWS

ADDRESSES = st.ip_addresses()
PORTS = st.integers(1, 65535)
NAMES = st.sampled_from(["rail1", "rail2", "eth0", "mlx5_0"])
COMMANDS = st.sampled_from(["iperf3", "python3", "ib_write_bw", ""])
EVERYTHING = [*samples.one_of_each(), samples.app_delay(local_port=40_000)]


@st.composite
def flows(draw: st.DrawFn) -> TcpFlow:
    rail = draw(st.integers(1, 2))
    return samples.tcp_flow(
        rail,
        local=str(draw(ADDRESSES)),
        local_port=draw(PORTS),
        remote=str(draw(ADDRESSES)),
        remote_port=draw(PORTS),
        interface=draw(NAMES),
        path=draw(st.none() | st.just(samples.path(rail))),
        owner=Owner(pid=draw(st.integers(0, 99)), command=draw(COMMANDS)),
    )


@st.composite
def queue_pairs(draw: st.DrawFn) -> RdmaQueuePair:
    return samples.rdma_qp(
        draw(st.integers(1, 99)),
        verdict=draw(st.sampled_from(VERDICTS)),
        remote=draw(st.just("") | ADDRESSES.map(str)),
        device=draw(NAMES),
        owner=Owner(pid=draw(st.integers(0, 99)), command=draw(COMMANDS)),
        path=draw(st.none() | st.just(samples.path())),
    )


SIGNALS = st.lists(flows() | queue_pairs() | st.sampled_from(EVERYTHING), max_size=20)


def plain(address: str) -> Any:
    """The address, out of its IPv6 clothes if it is one of IPv4."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def prefix_of(address: str, bits: int) -> str:
    most = plain(address).max_prefixlen
    return str(ipaddress.ip_network(f"{plain(address)}/{min(bits, most)}", strict=False))


@given(flows(), st.integers(0, 128))
def test_a_connection_passes_what_it_has_and_nothing_else(flow: TcpFlow, bits: int) -> None:
    own: dict[str, Any] = {
        "dst": [prefix_of(flow.remote, bits)],
        "src": [prefix_of(flow.local, bits)],
        "port": [flow.local_port],
        "interface": [flow.interface],
    }
    if flow.owner.pid:
        own |= {"pid": [flow.owner.pid]}
    if flow.owner.command:
        own |= {"command": [flow.owner.command[1:4].upper()]}
    if flow.path is not None:
        own |= {"path": [flow.path.gateway]}
    if plain(flow.local).version == plain(flow.remote).version:
        assert parse(**own).passes(flow)
    for name, values in own.items():
        assert parse(**{name: values}).passes(flow), name
    foreign: dict[str, Any] = {
        "port": [next(port for port in range(1, 4) if port not in (flow.local_port, flow.remote_port))],
        "pid": [flow.owner.pid + 1],
        "interface": [flow.interface + "x"],
        "command": ["no such command"],
        "path": ["no such path"],
        "verdict": ["ok"],
    }
    for name, values in foreign.items():
        assert not parse(**{name: values}).passes(flow), name


@given(flows(), ADDRESSES, st.integers(0, 128))
def test_prefixes_hold_what_the_standard_library_says(flow: TcpFlow, address: Any, bits: int) -> None:
    text = prefix_of(str(address), bits)
    network, remote = ipaddress.ip_network(text), plain(flow.remote)
    expected = network.version == remote.version and remote in network
    assert parse(dst=[text]).passes(flow) == expected
    assert parse(dst=[text, "0.0.0.0/0", "::/0"]).passes(flow)


@given(SIGNALS, st.lists(COMMANDS.filter(bool), max_size=2), st.lists(NAMES, max_size=2), st.lists(PORTS, max_size=2))
def test_more_kinds_narrow_and_more_values_widen(
    signals: list[AnySignal], commands: list[str], interfaces: list[str], ports: list[int]
) -> None:
    def passing(one: Filters) -> list[int]:
        return [index for index, signal in enumerate(signals) if one.passes(signal)]

    both = parse(command=commands, interface=interfaces, port=ports)
    for alone in (parse(command=commands), parse(interface=interfaces), parse(port=ports)):
        assert set(passing(both)) <= set(passing(alone))
    if commands:
        assert set(passing(parse(command=commands[:1]))) <= set(passing(parse(command=commands)))
    assert passing(Filters()) == list(range(len(signals))) and not Filters()
    # What is not remembered because it cannot pass would not have passed.
    for signal in signals:
        assert not both.passes(signal) or both.lasting().passes(signal)


@given(SIGNALS, st.sampled_from(VERDICTS))
def test_only_queue_pairs_have_verdicts(signals: list[AnySignal], verdict: str) -> None:
    wanted = parse(verdict=[verdict])
    for signal in signals:
        assert wanted.passes(signal) == (isinstance(signal, RdmaQueuePair) and signal.verdict == verdict)
    assert not wanted.lasting()  # a verdict changes: it must not keep the newest word from being heard


def test_an_address_in_other_clothes_is_the_same() -> None:
    flow = samples.tcp_flow(remote="::ffff:10.9.0.2")
    assert parse(dst=["10.9.0.0/16"]).passes(flow) and not parse(dst=["::/0"]).passes(flow)
    assert parse(dst=["::ffff:10.9.0.0/112"]) == parse(dst=["10.9.0.0/16"])
    assert parse(dst=["::ffff:10.9.0.2"], src=["10.0.0.0/8"]).passes(samples.tcp_flow())
    assert parse(dst=["[fd00::1]"]).passes(samples.tcp_flow(remote="fd00::1"))
    assert not parse(dst=["::/0", "0.0.0.0/0"]).passes(samples.rdma_qp(remote=""))


def test_a_gpu_is_chosen_by_index_uuid_or_process() -> None:
    first = samples.gpu(gpu=1, uuid="GPU-1a2b", processes=[7, 9])
    timer = samples.gpu_clock(uuid="GPU-1a2b")
    for given_ in ({"gpu": ["1"]}, {"gpu": ["gpu-1A"]}, {"gpu": ["GPU-1a2b"]}, {"pid": [9]}):
        assert parse(**given_).passes(first)
        assert parse(**given_).passes(timer) == (given_ in ({"gpu": ["gpu-1A"]}, {"gpu": ["GPU-1a2b"]}))
    for given_ in ({"gpu": ["11"]}, {"gpu": ["2"]}, {"gpu": ["GPU-1a2b3"]}, {"gpu": ["1a2b"]}, {"pid": [8]}):
        assert not parse(**given_).passes(first)


def test_of_dropped_packets_the_reasons_asked_for_are_left() -> None:
    drops = samples.packet_drops()
    (some,) = parse(reason=["qdisc"]).select([drops, samples.path_mtu()])
    assert isinstance(some, PacketDrops) and [each.reason for each in some.reasons] == ["QDISC_DROP"]
    assert parse(reason=["netfilter"]).select([drops]) == parse(pid=[1]).select([drops]) == []
    assert parse(reason=["no_", "DROP"]).select([drops]) == Filters().select([drops]) == [drops]


def test_what_has_paths_passes_by_any_of_them() -> None:
    link = samples.link(paths=[samples.path(1, "h2"), samples.path(1, "h3")])
    assert parse(dst=["10.9.0.3"]).passes(link) and parse(path=["h1>h3"]).passes(link)
    assert parse(interface=["rail1"]).passes(samples.path_mtu()) and not parse(interface=["rail1"]).passes(
        samples.path_ecn(2)
    )
    assert parse(interface=["rxe0"]).passes(samples.rdma_port()) and parse(interface=["rail1"]).passes(
        samples.rdma_qp()
    )
    assert not parse(pid=[1]).passes(samples.tcp_path()) and not parse(dst=["::/0", "0.0.0.0/0"]).passes(
        samples.tcp_host()
    )


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"dst": ["10.9.0.0/33"]}, "neither an address nor a prefix; write it like 10.9.0.0/16"),
        ({"src": ["h2"]}, "--src: 'h2'"),
        ({"dst": ["10.0.0.0/8"], "src": ["fd00::/8"]}, "two families of addresses; give prefixes of one family"),
        ({"port": [0]}, "it is within 1 and 65535"),
        ({"port": [70_000]}, "it is within 1 and 65535"),
        ({"pid": [-1]}, "--pid -1"),
        ({"command": [" "]}, "--command is empty"),
        ({"path": [""]}, "--path is empty"),
        ({"interface": ["rail 1"]}, "`swerve links` lists"),
        ({"interface": [""]}, "cannot be the name"),
        ({"verdict": ["congestd"]}, "did you mean congested? there are: ok, congested"),
    ],
)
def test_what_nothing_could_pass_is_an_error_with_a_next_step(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(**given_)
    assert said in str(error.value) and error.value.next_step


def test_a_filter_that_no_row_of_a_table_has_is_an_error() -> None:
    with pytest.raises(UsageError, match="it can be narrowed with --interface"):
        query.asked_for("ports", None, {"pid": (7,)})
    with pytest.raises(UsageError, match="leave it out"):
        query.asked_for("suspects", None, {"verdict": ("ok",)})
    asked = query.asked_for("ports", None, {"pid": (), "interface": ("rxe0",)})
    assert asked.filters.wanted == {"interface": ("rxe0",)}


@pytest.mark.parametrize("kind", sorted(table_registry.LISTINGS))
def test_every_filter_of_a_view_can_be_passed_and_no_other(kind: str) -> None:
    rows = [row for row in EVERYTHING if type(row) in VIEWS[kind].shows]
    had = {name for row in rows for name, has in filters.TRAITS.get(type(row), {}).items() if tuple(has(row))}
    assert had == VIEWS[kind].filters


@pytest.mark.parametrize("word", ["RETX", "retx"])
def test_columns_are_found_whatever_the_case(word: str) -> None:
    assert query.asked_for("tcp", word, {}).sort == "retx"


@pytest.mark.parametrize(
    ("kind", "word", "near"),
    [
        ("tcp", "rtx", "retx"),
        ("links", "drop", "drops"),
        ("rdma", "bandwith", "bandwidth"),
        ("ports", "sequense", "sequence"),
        ("events", "whn", "when"),
        ("drops", "reasons", "reason"),
        ("suspects", "slow", "slowness"),
    ],
)
def test_a_column_that_is_none_names_the_nearest(kind: str, word: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"no column to sort by '{word}'; did you mean {near}\\?"):
        query.asked_for(kind, word, {})


def test_a_word_that_is_like_none_gets_them_all() -> None:
    with pytest.raises(UsageError) as error:
        chosen("zzz", ["one", "two"], "word")
    assert mentions(str(error.value), "no word 'zzz'", "one", "two")


NUMBERED: Listing[tuple[int | None, str]] = Listing(
    (
        Column("n", lambda row: str(row[0]), {"n": much(lambda row: row[0]), "least": little(lambda row: row[0])}),
        Column("s", lambda row: row[1], {"s": named(lambda row: row[1])}),
    ),
    lambda row: (row[1],),
)


@given(st.lists(st.tuples(st.none() | st.integers(-5, 5), st.text("abC", max_size=2)), max_size=12))
def test_the_worst_comes_first_and_the_unknown_last(rows: list[tuple[int | None, str]]) -> None:
    usual = NUMBERED.ordered(rows, None)
    assert usual == sorted(rows, key=lambda row: row[1]) == NUMBERED.ordered(rows, "no column of this table")
    for word, sign in (("n", -1), ("least", 1)):
        got = NUMBERED.ordered(rows, word)
        known = [row for row in got if row[0] is not None]
        assert got == known + [row for row in usual if row[0] is None]
        assert known == sorted((row for row in usual if row[0] is not None), key=lambda row: sign * (row[0] or 0))
    names = [row[1].lower() for row in NUMBERED.ordered(rows, "s")]
    assert names == sorted(filter(None, names)) + [""] * names.count("")


@given(st.lists(queue_pairs(), max_size=12), st.sampled_from(["bandwidth", "verdict", "outstanding", "qp", "command"]))
def test_sorting_keeps_every_row_and_other_kinds_where_they_were(rows: list[RdmaQueuePair], word: str) -> None:
    signals: list[AnySignal] = [samples.rdma_sight(), *rows, samples.rdma_suspects()]
    got = table_registry.ordered("rdma", signals, word, samples.AT_NS)
    assert got[0] == signals[0] and got[-1] == signals[-1]
    assert sorted(map(msgspec.json.encode, got)) == sorted(map(msgspec.json.encode, signals))
    if word == "verdict":
        worst = ["dead", "congested", "slow_receiver", "unknown", "no_demand", "ok"]
        order = [worst.index(row.verdict) for row in got[1:-1] if isinstance(row, RdmaQueuePair)]
        assert order == sorted(order)
