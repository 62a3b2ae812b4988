"""Drivers' names for their statistics, as the drivers have them, and what is made of them."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from pytools.kernel.ethtool import Ethtool
from pytools.kernel.netlink.links import LinkRow
from pytools.signals import Pause
from pytools.sources.links import driver
from pytools.sources.links.driver import Statistics
from pytools.sources.links.events import PauseHistory
from pytools.sources.links.interface import Interface

S = 1_000_000_000
PRIORITIES = range(8)
LINK = LinkRow(5, "eth0", True, True, 4, 2, 2, 1500, *range(10, 18))


def per_priority(*patterns: str) -> list[str]:
    return [pattern.format(priority) for priority in PRIORITIES for pattern in patterns]


MLX5 = [
    *("rx_packets", "rx_bytes", "tx_packets", "tx_queue_stopped", "tx_queue_dropped", "rx_wqe_err", "rx_out_of_buffer"),
    *("rx_steer_missed_packets", "tx_pause_storm_warning_events", "tx_pause_storm_error_events"),
    *("rx_crc_errors_phy", "rx_discards_phy", "tx_errors_phy", "rx_pause_ctrl_phy", "tx_pause_ctrl_phy"),
    *(
        "rx_symbol_err_phy",
        "rx_corrected_bits_phy",
        "link_down_events_phy",
        "rx_packets_phy",
        "outbound_pci_stalled_wr",
    ),
    *per_priority("rx_prio{}_bytes", "rx_prio{}_packets", "rx_prio{}_discards", "rx_prio{}_buf_discard"),
    *per_priority("rx_prio{}_pause", "rx_prio{}_pause_duration", "rx_prio{}_pause_transition"),
    *per_priority("tx_prio{}_pause", "tx_prio{}_pause_duration", "tx_prio{}_bytes"),
    *("ch0_events", "ch0_poll", "rx0_packets", "rx0_wqe_err", "rx0_buff_alloc_err", "rx0_xdp_drop", "tx0_dropped"),
]
BNXT = [
    *("[0]: rx_ucast_packets", "[0]: rx_discards", "[0]: tx_errors", "rx_total_discard_pkts", "rx_fcs_err_frames"),
    *("rx_pause_frames", "tx_pause_frames", "rx_pfc_frames", "rx_stat_discard", "tx_err", "link_down_events"),
    *per_priority("rx_pfc_ena_frames_pri{}", "tx_pfc_ena_frames_pri{}"),
    *per_priority("pfc_pri{}_rx_duration_us", "pfc_pri{}_rx_transitions"),
    *per_priority("pfc_pri{}_tx_duration_us", "pfc_pri{}_tx_transitions"),
    *per_priority("rx_discard_packets_cos{}", "rx_packets_pri{}"),
]
ICE = [
    *("rx_unicast", "tx_errors", "rx_dropped", "tx_queue_0_packets", "rx_queue_0_bytes", "rx_crc_errors.nic"),
    *("link_xon_rx.nic", "link_xoff_rx.nic", "link_xon_tx.nic", "link_xoff_tx.nic", "illegal_bytes.nic"),
    *("mac_local_faults.nic", "rx_dropped.nic", "tx_dropped_link_down.nic", "rx_size_64.nic"),
    *per_priority("tx_priority_{}_xon.nic", "tx_priority_{}_xoff.nic"),
    *per_priority("rx_priority_{}_xon.nic", "rx_priority_{}_xoff.nic"),
]
I40E = [
    *("rx_packets", "port.rx_bytes", "port.link_xoff_rx", "port.link_xoff_tx", "port.rx_crc_errors", "port.tx_errors"),
    *per_priority("port.tx_priority_{}_xon_tx", "port.tx_priority_{}_xoff_tx"),
    *per_priority("port.rx_priority_{}_xon_rx", "port.rx_priority_{}_xoff_rx", "port.rx_priority_{}_xon_2_xoff"),
]
IXGBE = [
    *("rx_packets", "rx_missed_errors", "rx_no_buffer_count", "tx_timeout_count", "rx_no_dma_resources"),
    *("tx_flow_control_xon", "tx_flow_control_xoff", "rx_flow_control_xon", "rx_flow_control_xoff"),
    *("tx_queue_0_packets", "tx_queue_0_bytes"),
    *per_priority("tx_pb_{}_pxon", "tx_pb_{}_pxoff", "rx_pb_{}_pxon", "rx_pb_{}_pxoff"),
]
CXGB4 = [
    *("TxOctetsOK", "TxErrorFrames", "TxFramesDropped", "TxPauseFrames", "RxPauseFrames", "RxFCSErrors"),
    *("RxBG0FramesDropped", "RxBG0FramesTrunc", "RxFrames64"),
    *per_priority("TxPPP{}Frames", "RxPPP{}Frames"),
]
ENA = [
    *("tx_timeout", "suspend", "resume", "wd_expired", "rx_drops", "tx_drops"),
    *("bw_in_allowance_exceeded", "bw_out_allowance_exceeded", "pps_allowance_exceeded"),
    *("conntrack_allowance_exceeded", "conntrack_allowance_available", "linklocal_allowance_exceeded"),
    *("queue_0_tx_cnt", "queue_0_tx_dma_mapping_err", "queue_0_rx_bad_csum"),
]
VETH = ["peer_ifindex", "rx_queue_0_xdp_packets", "rx_queue_0_drops", "rx_queue_0_xdp_drops", "tx_queue_0_xdp_xmit"]


def numbered(names: list[str]) -> dict[str, int]:
    """Every statistic has a value of its own, from which it is known again."""
    return {name: 1000 + place for place, name in enumerate(names)}


@pytest.mark.parametrize(
    ("names", "received", "sent", "received_us", "sent_us"),
    [
        (MLX5, "rx_prio{}_pause", "tx_prio{}_pause", "rx_prio{}_pause_duration", "tx_prio{}_pause_duration"),
        (
            BNXT,
            "rx_pfc_ena_frames_pri{}",
            "tx_pfc_ena_frames_pri{}",
            "pfc_pri{}_rx_duration_us",
            "pfc_pri{}_tx_duration_us",
        ),
        (ICE, "rx_priority_{}_xoff.nic", "tx_priority_{}_xoff.nic", None, None),
        (I40E, "port.rx_priority_{}_xoff_rx", "port.tx_priority_{}_xoff_tx", None, None),
        (IXGBE, "rx_pb_{}_pxoff", "tx_pb_{}_pxoff", None, None),
        (CXGB4, "RxPPP{}Frames", "TxPPP{}Frames", None, None),
    ],
    ids=["mlx5", "bnxt", "ice", "i40e", "ixgbe", "cxgb4"],
)
def test_pauses_by_priority(
    names: list[str], received: str, sent: str, received_us: str | None, sent_us: str | None
) -> None:
    values = numbered(names)
    pauses = driver.pauses_of(driver.meaning_of(names), list(values.values()))
    assert {key for key in pauses if key is not None} == set(PRIORITIES)
    for priority in PRIORITIES:
        assert pauses[priority] == Pause(
            priority=priority,
            received=values[received.format(priority)],
            sent=values[sent.format(priority)],
            received_duration_us=values[received_us.format(priority)] if received_us else None,
            sent_duration_us=values[sent_us.format(priority)] if sent_us else None,
        )
    assert [each.priority for each in driver.listed(pauses)] == [*PRIORITIES, None]


@pytest.mark.parametrize(
    ("names", "received", "sent"),
    [
        (MLX5, "rx_pause_ctrl_phy", "tx_pause_ctrl_phy"),
        (BNXT, "rx_pause_frames", "tx_pause_frames"),
        (ICE, "link_xoff_rx.nic", "link_xoff_tx.nic"),
        (I40E, "port.link_xoff_rx", "port.link_xoff_tx"),
        (IXGBE, "rx_flow_control_xoff", "tx_flow_control_xoff"),
        (CXGB4, "RxPauseFrames", "TxPauseFrames"),
    ],
    ids=["mlx5", "bnxt", "ice", "i40e", "ixgbe", "cxgb4"],
)
def test_pauses_of_the_whole_link(names: list[str], received: str, sent: str) -> None:
    values = numbered(names)
    pauses = driver.pauses_of(driver.meaning_of(names), list(values.values()))
    assert pauses[None] == Pause(priority=None, received=values[received], sent=values[sent])


TROUBLE = {
    "mlx5": (
        MLX5,
        {
            *("tx_queue_dropped", "rx_wqe_err", "rx_out_of_buffer", "rx_steer_missed_packets", "rx_crc_errors_phy"),
            *("tx_pause_storm_warning_events", "tx_pause_storm_error_events", "rx_discards_phy", "tx_errors_phy"),
            *("rx_symbol_err_phy", "link_down_events_phy", "outbound_pci_stalled_wr"),
            *per_priority("rx_prio{}_discards", "rx_prio{}_buf_discard"),
        },
    ),
    "bnxt": (
        BNXT,
        {
            *("rx_total_discard_pkts", "rx_fcs_err_frames", "rx_stat_discard", "tx_err", "link_down_events"),
            *per_priority("rx_discard_packets_cos{}"),
        },
    ),
    "ice": (
        ICE,
        {
            *("tx_errors", "rx_dropped", "rx_crc_errors.nic", "illegal_bytes.nic", "mac_local_faults.nic"),
            *("rx_dropped.nic", "tx_dropped_link_down.nic"),
        },
    ),
    "i40e": (I40E, {"port.rx_crc_errors", "port.tx_errors"}),
    "ixgbe": (IXGBE, {"rx_missed_errors", "rx_no_buffer_count", "tx_timeout_count", "rx_no_dma_resources"}),
    "cxgb4": (CXGB4, {"TxErrorFrames", "TxFramesDropped", "RxFCSErrors", "RxBG0FramesDropped", "RxBG0FramesTrunc"}),
    "ena": (
        ENA,
        {
            *("tx_timeout", "suspend", "wd_expired", "rx_drops", "tx_drops", "bw_in_allowance_exceeded"),
            *("bw_out_allowance_exceeded", "pps_allowance_exceeded", "conntrack_allowance_exceeded"),
            "linklocal_allowance_exceeded",
        },
    ),
    "veth": (VETH, {"rx_queue_0_drops", "rx_queue_0_xdp_drops"}),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_signs_of_trouble_and_nothing_else(name: str) -> None:
    names, expected = TROUBLE[name]
    values = numbered(names)
    assert driver.trouble_of(driver.meaning_of(names), list(values.values())) == {
        each: values[each] for each in names if each in expected
    }


def test_what_is_zero_is_no_trouble() -> None:
    assert driver.trouble_of(driver.meaning_of(VETH), [0] * len(VETH)) == {}


def test_a_driver_without_pauses_and_trouble_means_nothing() -> None:
    assert not driver.meaning_of(["peer_ifindex", "rx_packets"])
    assert driver.meaning_of(VETH)


def pause(**counts: int) -> dict[int | None, Pause]:
    return {3: Pause(priority=3, **counts)}


def test_durations_say_exactly_how_long_the_link_was_held() -> None:
    before, now = pause(received=10, received_duration_us=5_000), pause(received=30, received_duration_us=655_000)
    (held,) = driver.held(before, now, S, 100_000)
    assert (held.priority, held.way, held.share, held.frames, held.exact) == (3, "received", 0.65, 20, True)


def test_frames_alone_say_how_long_at_most() -> None:
    # At 100 Gbit/s one frame holds for 65535 quanta of 512 bits: 335.5 us.
    (held,) = driver.held(pause(sent=0), pause(sent=1000), S, 100_000)
    assert (held.way, held.exact) == ("sent", False)
    assert held.share == pytest.approx(0.33554, rel=1e-4)
    assert list(driver.held(pause(sent=0), pause(sent=1000), S, None)) == []


def test_a_counter_that_was_set_back_counts_from_zero() -> None:
    (held,) = driver.held(pause(received_duration_us=10**9), pause(received_duration_us=100_000), S, None)
    assert held.share == 0.1


def storm(history: PauseHistory, *held: driver.Held, counted: int = 0) -> str | None:
    happened = history.take(held, counted, 7)
    return None if happened is None else happened.detail


def test_half_of_a_window_by_durations_is_a_storm() -> None:
    history = PauseHistory()
    assert storm(history, driver.Held(3, "received", 0.49, 9, True)) is None
    happened = history.take([driver.Held(3, "received", 0.5, 9, True)], 0, 7)
    assert happened is not None
    assert (happened.what, happened.happened_ns) == ("pause_storm", 7)
    assert happened.values == {"share_percent": 50, "frames": 9, "storms": 0, "priority": 3}


def test_by_frames_alone_it_takes_two_whole_windows_of_the_same_priority() -> None:
    history = PauseHistory()
    whole = driver.Held(3, "received", 1.2, 5000, False)
    assert storm(history, whole) is None
    assert storm(history, driver.Held(4, "received", 1.2, 5000, False)) is None
    assert storm(history, whole) is None
    assert "up to 100%" in (storm(history, whole) or "")
    assert storm(history, driver.Held(3, "received", 0.9, 4000, False)) is None


def test_a_storm_that_the_driver_counted_is_told() -> None:
    assert "2 pause storms" in (storm(PauseHistory(), counted=2) or "")
    assert storm(PauseHistory()) is None


class Refusing:
    """A driver that answers when it likes."""

    def __init__(self, names: list[str]) -> None:
        self.names_told, self.answers = names, True

    def count(self, _interface: str) -> int:
        return len(self.names_told)

    def names(self, _interface: str, _count: int) -> list[str]:
        return self.names_told if self.answers else []

    def values(self, _interface: str, count: int) -> NDArray[np.uint64] | None:
        return np.full(count, 5, np.uint64) if self.answers else None

    def speed_mbps(self, _interface: str) -> int | None:
        return 100_000


def test_a_driver_that_refuses_its_names_is_counted_and_asked_again() -> None:
    refusing = Refusing(["rx_prio3_pause", "rx_prio3_pause_duration"])
    statistics = Statistics(cast(Ethtool, refusing))
    refusing.answers = False
    assert not statistics.read(1, "eth0", 0).values
    assert statistics.failed == 1
    refusing.answers = True
    assert list(statistics.read(1, "eth0", S).values) == [5, 5]


def test_what_a_driver_counted_before_it_refused_once_is_no_new_storm() -> None:
    meaning = driver.meaning_of(["tx_pause_storm_error_events"])
    watched = Interface("h", LINK, 0, 60 * S)
    assert watched.take_driver(meaning, [5], 100_000, S) == []
    assert watched.take_driver(driver.NOTHING, (), 100_000, 2 * S) == []
    assert watched.take_driver(meaning, [5], 100_000, 3 * S) == []
    assert [event.what for event in watched.take_driver(meaning, [6], 100_000, 4 * S)] == ["pause_storm"]
