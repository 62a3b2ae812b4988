"""GPUs through the real nvidia-ml-py and a libnvidia-ml.so of our own: every figure exact, failures said by name."""

from __future__ import annotations

import ctypes
import io
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
import samples
import support
from nvml_kit import EVERY, Fake, built
from rich.console import Console

from pytools.config import AgentConfig, Windows
from pytools.config import Gpu as Settings
from pytools.ipc.bus import Bus, Subscription
from pytools.signals import Gpu, GpuLink, GpuReason
from pytools.sources.gpu import session as sessions
from pytools.sources.gpu.queries import queries
from pytools.sources.gpu.readings import Readings
from pytools.sources.gpu.source import GpuSource
from pytools.views import network_panel, table_registry
from pytools.views.filters import Query
from pytools.views.metrics.model import Model as Metrics
from pytools.views.metrics.series import expose
from pytools.views.model import Model, fold

LOST, UNSUPPORTED, MISSING, MEMORY = 15, 3, 13, 20


Load = Callable[..., Fake]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Has nvidia-ml-py call the stand-in."""
    loaded: list[Fake] = []

    def one(*flags: str) -> Fake:
        copy = tmp_path / "libnvidia-ml.so.1"
        copy.write_bytes(built(*flags).read_bytes())
        loaded.append(Fake(copy))
        monkeypatch.setattr(pynvml, "nvmlLib", loaded[-1].library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return loaded[-1]

    yield one
    for fake in loaded:
        fake.release()


@pytest.fixture
def fake(load: Load) -> Fake:
    return load()


def handle(index: int = 0) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def ask(readings: Readings, found: list[Any]) -> dict[str, str]:
    """Run every query once, as the worker does; returns what failed."""
    failed = {}
    for query in found:
        readings.query = query.name
        try:
            query.run()
        except pynvml.NVMLError as error:
            failed[query.name] = str(error)
    return failed


# ---- queries ----


def test_every_figure_is_read(fake: Fake) -> None:
    fake.set(0, sm=1755, memory=2619, sm_max=1980, memory_max=2700, reasons=0x24 | 1 << 12, busy=97, memory_busy=41)
    fake.set(0, power=698_500, power_limit=700_000, temperature=71, pid=4711, ecc_corrected=2, ecc_uncorrected=0)
    fake.set(0, generation=5, generation_max=5, width=8, width_max=16, replays=3, pcie_sent=1664, pcie_received=573)
    fake.set(0, links=2, link0_up=1, link_up=0)
    readings = Readings()
    assert ask(readings, queries(pynvml, handle(), readings)) == {}
    taken = readings.take()
    assert taken.figures == {
        "memory_mhz": 2619,
        "sm_max_mhz": 1980,
        "memory_max_mhz": 2700,
        "busy": 97,
        "memory_busy": 41,
        "power_mw": 698_500,
        "power_limit_mw": 700_000,
        "temperature_c": 71,
        "pcie_generation": 5,
        "pcie_generation_max": 5,
        "pcie_width": 8,
        "pcie_width_max": 16,
        "pcie_sent_bytes_per_s": 1_664_000,
        "pcie_received_bytes_per_s": 573_000,
    }
    assert (taken.clocks, taken.processes) == ([1755], [4711, 4712])
    assert taken.reasons == [GpuReason("sw_power_cap", 1.0), GpuReason("sw_thermal", 1.0), GpuReason("bit_12", 1.0)]
    assert [(link.link, link.active, link.errors) for link in taken.links] == [(0, True, None), (1, False, None)]


def test_counters_count_from_their_second_reading_and_through_a_reset(fake: Fake) -> None:
    fake.set(0, ecc_uncorrected=7, replays=100, links=2, link0_up=1, link_up=1, link_errors=5)
    readings = Readings()
    found = queries(pynvml, handle(), readings)
    grown = []
    for ecc, replays, errors in ((7, 100, 5), (9, 100, 6), (9, 4, 6), (9, 4, 6)):
        fake.set(0, ecc_uncorrected=ecc, replays=replays, link_errors=errors)
        ask(readings, found)
        taken = readings.take()
        grown.append((taken.grown.get("ecc_uncorrected"), taken.grown.get("pcie_replays"), taken.links[1].errors))
    assert grown == [(None, None, None), (2, 0, 1), (0, 4, 0), (0, 0, 0)]
    assert taken.totals["ecc_uncorrected"] == 9


def test_throughput_of_a_link_is_the_growth_between_two_readings() -> None:
    readings = Readings()
    readings.links({0: True})
    seen = []
    for at_s, kib in ((10, 1000), (15, 1000 + 5 * 4096), (20, 500)):  # the last: the driver was loaded again
        readings.rate({"link0_sent": kib * 1024, "link0_received": 0}, at_s * 10**9)
        seen.append(readings.take().links)
    rate = 4096 * 1024
    assert seen == [
        [GpuLink(0, True, None, None, None)],
        [GpuLink(0, True, rate, 0, None)],
        [GpuLink(0, True, rate, 0, None)],
    ]


def test_a_query_that_fails_costs_only_itself(fake: Fake) -> None:
    fake.set(0, sm=1200, power=5000, temperature=50, links=1, link0_up=1)
    fake.fail("nvmlDeviceGetPowerUsage", UNSUPPORTED)
    fake.fail("nvmlDeviceGetPcieThroughput", MEMORY)
    fake.set(0, field_status=UNSUPPORTED)
    readings = Readings()
    assert ask(readings, queries(pynvml, handle(), readings)) == {
        "nvmlDeviceGetPowerUsage": "Not Supported",
        "nvmlDeviceGetPcieThroughput(sent)": "Insufficient Memory",
        "nvmlDeviceGetPcieThroughput(received)": "Insufficient Memory",
        "nvmlDeviceGetFieldValues(NVLINK_THROUGHPUT, 0)": "Not Supported",
    }
    taken = readings.take()
    assert (taken.clocks, taken.figures["temperature_c"], "power_mw" in taken.figures) == ([1200], 50, False)


def test_a_figure_goes_with_its_query() -> None:
    readings = Readings()
    for name, value in (("power", 5), ("temperature", 6)):
        readings.query = name
        readings.set({name: value})
    readings.fail("power", "Unknown Error")
    assert readings.take().figures == {"temperature": 6}
    readings.fail("power", "")
    assert readings.take().failed == {}


def test_a_gpu_without_nvlink_says_so_once(fake: Fake) -> None:
    readings = Readings()
    assert list(ask(readings, queries(pynvml, handle(), readings))) == ["nvmlDeviceGetNvLinkState"]
    assert readings.take().links == []


def test_an_older_driver_has_the_reasons_under_another_name(load: Load) -> None:
    fake = load("-DWITHOUT_REASONS")
    fake.set(0, reasons=0x80, links=1)
    readings = Readings()
    assert ask(readings, queries(pynvml, handle(), readings)) == {}
    assert readings.take().reasons == [GpuReason("hw_power_brake", 1.0)]
    fake.fail("nvmlDeviceGetCurrentClocksThrottleReasons", MISSING)
    failed = ask(readings, queries(pynvml, handle(), readings))
    assert failed == {"nvmlDeviceGetCurrentClocksEventReasons": "Function Not Found"}


# ---- the source, with its threads ----


class Running:
    """A source that is driven as the agent drives it."""

    def __init__(self, driver: Path, settings: Settings | None = None) -> None:
        self.bus = Bus()
        config = AgentConfig("h1", [], windows=Windows(long_ms=100.0), gpu=settings or Settings())
        self.source = GpuSource(config, self.bus, driver)
        self.newest: dict[int, Gpu] = {}
        self.xids: list[tuple[int, int]] = []
        self.listener: Subscription | None = None

    def listen(self) -> None:
        self.listener = self.bus.subscribe(frozenset({"gpu"}))

    def turn(self) -> bool:
        """One tick, and what it published; for use as a condition."""
        self.source.tick(time.monotonic_ns())
        for signal in self.listener.read() if self.listener is not None else ():
            assert isinstance(signal, Gpu)
            self.newest[signal.gpu] = signal
            self.xids += [(signal.gpu, xid) for xid in signal.xids]
        return True

    def until(self, condition: Callable[[], Any], what: str) -> None:
        support.wait_until(lambda: self.turn() and condition(), 20, what)

    def states(self) -> dict[int, str]:
        return {gpu: signal.state for gpu, signal in self.newest.items()}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    driver = tmp_path / "version"
    driver.touch()
    made = Running(driver)
    yield made
    made.source.close()
    if pynvml.nvmlLib is not None:
        pynvml.nvmlLib.fake_release()
    session = made.source._session
    if session is not None:
        support.wait_until(lambda: session.over, 10, "the threads have ended")


def test_nvml_is_open_while_somebody_listens(fake: Fake, running: Running) -> None:
    for _ in range(5):
        running.turn()
    assert fake.calls("nvmlInitWithFlags") == 0
    running.listen()
    running.until(lambda: running.states() == {0: "ok", 1: "ok"}, "both GPUs are published")
    assert [running.newest[gpu].uuid[:12] for gpu in (0, 1)] == ["GPU-00000000", "GPU-00000001"]
    assert (running.newest[1].name, running.newest[1].pci) == ("Fake H100", "00000000:01:00.0")
    assert running.listener is not None
    running.listener.close()
    running.until(lambda: fake.calls("nvmlShutdown") == 1, "NVML is shut down")
    running.listen()
    running.source._again_ns = 0
    running.newest.clear()
    running.until(lambda: running.states() == {0: "ok", 1: "ok"}, "both GPUs are published again")


def test_figures_of_a_window_are_published(fake: Fake, running: Running) -> None:
    fake.set(EVERY, sm=1980, sm_max=1980, busy=50, power=250_500)
    fake.set(1, temperature=66)
    fake.set(0, temperature=33)
    running.listen()
    running.until(
        lambda: (
            all(gpu in running.newest and running.newest[gpu].temperature_c for gpu in (0, 1))
            and running.newest[1].failed
        ),
        "all is read, each at its own pace",
    )
    found = running.newest[1]
    assert (found.temperature_c, found.sm_max_mhz, found.busy, found.power_w) == (66, 1980, 0.5, 250.5)
    assert (running.newest[0].temperature_c, found.failed.keys()) == (33, {"nvmlDeviceGetNvLinkState"})


def test_a_gpu_that_hangs_holds_up_nothing_else(fake: Fake, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HUNG_NS", 200_000_000)
    running.listen()
    running.until(lambda: running.states() == {0: "ok", 1: "ok"}, "both GPUs are published")
    fake.hang("nvmlDeviceGetPowerUsage", 0)
    running.until(lambda: running.states() == {0: "hung", 1: "ok"}, "GPU 0 is said to hang")
    assert running.newest[0].reason.startswith("nvmlDeviceGetPowerUsage has not returned for ")
    assert (running.newest[0].temperature_c, running.newest[0].readings) == (None, 0)
    before = fake.calls("nvmlDeviceGetClockInfo", 1)
    running.until(lambda: fake.calls("nvmlDeviceGetClockInfo", 1) > before + 2, "GPU 1 is asked on")
    fake.release()
    running.until(lambda: running.states() == {0: "ok", 1: "ok"}, "GPU 0 answers again")


def test_an_nvml_that_does_not_open_says_so(fake: Fake, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HUNG_NS", 200_000_000)
    fake.hang("nvmlInitWithFlags")
    running.listen()
    running.until(lambda: running.source.failed, "the source says that it hangs")
    assert running.source.failed["gpu"].startswith("nvmlInit_v2 has not returned for ")
    running.source.close()  # does not wait for it
    assert running.newest == {}


def test_an_nvml_that_fails_says_why(fake: Fake, running: Running) -> None:
    fake.fail("nvmlInitWithFlags", 9)
    running.listen()
    running.until(lambda: running.source.failed, "the source says why")
    assert running.source.failed == {"gpu": "nvmlInit_v2: Driver Not Loaded"}
    fake.fail("nvmlInitWithFlags", 0)
    running.source._again_ns = 0  # a minute later
    running.until(lambda: running.states() == {0: "ok", 1: "ok"}, "NVML is opened again")
    assert running.source.failed == {}


def test_a_package_that_is_missing_is_named(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    running.listen()
    running.until(lambda: running.source.failed, "the source says what is missing")
    assert running.source.failed["gpu"].endswith("pip install nvidia-ml-py")


def test_a_gpu_that_is_lost_says_so(fake: Fake, running: Running) -> None:
    running.listen()
    running.until(lambda: running.states() == {0: "ok", 1: "ok"}, "both GPUs are published")
    fake.fail("nvmlDeviceGetClockInfo", LOST, 1)
    running.until(lambda: running.newest[1].state == "lost", "GPU 1 is lost")
    assert (running.newest[1].reason, running.newest[0].state) == ("GPU is lost", "ok")


def test_a_gpu_that_cannot_be_opened_leaves_the_other(fake: Fake, running: Running) -> None:
    fake.fail("nvmlDeviceGetUUID", MEMORY, 0)
    running.listen()
    running.until(lambda: running.states() == {1: "ok"}, "GPU 1 is published")


def test_xid_errors_belong_to_their_gpu(fake: Fake, running: Running) -> None:
    running.listen()
    running.until(lambda: running.states() == {0: "ok", 1: "ok"}, "both GPUs are published")
    fake.library.fake_xid(1, ctypes.c_ulonglong(79))
    fake.library.fake_xid(0, ctypes.c_ulonglong(48))
    running.until(lambda: len(running.xids) == 2, "both errors are published")
    for _ in range(3):
        running.turn()
    assert sorted(running.xids) == [(0, 48), (1, 79)]


def test_without_events_the_rest_is_read(fake: Fake, running: Running) -> None:
    fake.fail("nvmlDeviceRegisterEvents", UNSUPPORTED, 0)
    running.listen()
    running.until(
        lambda: 0 in running.newest and "nvmlDeviceRegisterEvents" in running.newest[0].failed, "a failure is named"
    )
    assert running.newest[0].failed["nvmlDeviceRegisterEvents"] == "Not Supported"
    assert "nvmlDeviceRegisterEvents" not in running.newest[1].failed


def test_without_a_driver_or_switched_off_nothing_is_asked(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "version").touch()
    for made in (Running(tmp_path / "none"), Running(tmp_path / "version", Settings(enabled=False))):
        made.listen()
        for _ in range(5):
            made.turn()
        assert (made.source._session, made.source.failed) == (None, {})
        made.source.close()
    assert fake.calls("nvmlInitWithFlags") == 0


def test_the_table_shows_what_lowers_the_clock(fake: Fake, running: Running) -> None:
    fake.set(EVERY, sm=1755, sm_max=1980, reasons=4, ecc_uncorrected=3)
    running.listen()
    running.until(
        lambda: (
            len(running.newest) == 2
            and all(row.clock_reasons and "nvmlDeviceGetNvLinkState" in row.failed for row in running.newest.values())
        ),
        "reasons, and what fails",
    )
    model = fold(Model(), running.newest.values())
    console = Console(file=io.StringIO(), width=220, color_system=None)
    console.print(table_registry.TABLES["gpu"](model, list(running.newest.values()), Query()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "sw_power_cap 100.0 %" in text and "1,755 / 1,980" in text
    assert support.mentions(text, "NVML", "nvmlDeviceGetNvLinkState", "Invalid Argument")


def test_top_names_what_is_wrong_with_a_gpu() -> None:
    well = {"xids": [], "ecc_uncorrected": 0, "pcie_replays": 0, "pcie_width": 16, "clock_reasons": [], "links": []}
    now_ns = samples.AT_NS
    assert network_panel.gpus(fold(Model(), [samples.gpu(**well)]), now_ns) is None
    rows = [
        samples.gpu(),
        samples.gpu(gpu=1, uuid="GPU-1", state="hung", reason="nvmlDeviceGetPowerUsage has not returned for 3 s"),
        samples.gpu(gpu=2, uuid="GPU-2", **well),
    ]
    line = network_panel.gpus(fold(Model(), rows), now_ns)
    assert line is not None and "GPU 2" not in line.plain
    first, second = line.plain.split("; ")
    bad = ("XID 48", "1 uncorrected ECC", "4 NVLink", "3 PCIe replays", "PCIe ×8 of ×16")
    assert support.mentions(first, "GPU 0", *bad, "clock", "sw_power_cap", "80.0 %")
    assert support.mentions(second, "GPU 1", "hung", rows[1].reason)


def test_metrics_count_errors_and_forget_no_reason() -> None:
    model = Metrics()
    model.connect(0, same_agent=False)
    model.take([samples.gpu(), samples.gpu(ecc_uncorrected=2, pcie_replays=None)])
    found = {
        (sample.name, sample.labels.get("kind") or sample.labels.get("clock_reason") or ""): sample.value
        for family in expose(model, samples.AT_NS, "")
        for sample in family.samples
        if sample.name.startswith("swerve_gpu_")
    }
    assert found["swerve_gpu_ecc_errors_total", "uncorrected"] == 3
    assert found["swerve_gpu_pcie_replays_total", ""] == 3
    assert found["swerve_gpu_xid_errors_total", ""] == 2
    assert found["swerve_gpu_sm_clock_hertz", ""] == 1.755e9
    assert (found["swerve_gpu_clock_reason_ratio", "sw_power_cap"], found["swerve_gpu_up", ""]) == (0.8, 1)
    assert found["swerve_gpu_clock_reason_ratio", "hw_thermal"] == 0
