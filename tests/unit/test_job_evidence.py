"""What is measured of a job: processors and quotas from files, paths from signals, GPUs; what is stale or missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import samples
from connections import connections, member
from support import mentions

from pytools.estimators import job_causes
from pytools.estimators.job_evidence import GpuUse, RankUse
from pytools.ipc.bus import Published
from pytools.signals import GPU_REASONS, Bandwidth, Delay, Histogram, Owner, PathDelay, Stall, TcpFlow
from pytools.signals import Path as NetworkPath
from pytools.sources.jobs import paths
from pytools.sources.jobs.cpu import Controller, Cpu, controllers, group_of
from pytools.sources.jobs.environment import Place
from pytools.sources.jobs.gpus import Gpus
from pytools.sources.jobs.paths import Delays
from pytools.sources.jobs.processes import Member
from pytools.sources.jobs.traffic import Sum, Traffic
from pytools.sources.jobs.verdicts import Verdicts

SECOND: Final = 10**9
MS: Final = 10**6
NOW: Final = samples.AT_NS

# ---- processors ----


class Host:
    """Files of /proc and of control groups; `version` is that of the hierarchy with the CPU's controller."""

    def __init__(self, folder: Path, version: int) -> None:
        self.proc, self.root, self.version = folder / "proc", folder / "groups", version
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "pressure").mkdir()
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,cpu,cpuacct"
        (self.proc / "self" / "mountinfo").write_text(f"30 29 0:26 / {self.root} rw - {kind}\n")
        self.host(busy=0, idle=0, steal=0, pressure_us=0)

    def host(self, busy: int, idle: int, steal: int, pressure_us: int) -> None:
        (self.proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 {steal} 0 0\ncpu0 1 1\n")
        (self.proc / "pressure" / "cpu").write_text(f"some avg10=0.00 total={pressure_us}\nfull avg10=0.00 total=0\n")

    def rank(self, pid: int, waited_ns: int, group: str) -> None:
        place = self.proc / str(pid)
        place.mkdir(exist_ok=True)
        (place / "schedstat").write_text(f"1000 {waited_ns} 7\n")
        (place / "cgroup").write_text(f"0::{group}\n" if self.version == 2 else f"4:memory:/x\n3:cpu,cpuacct:{group}\n")

    def group(self, path: str, throttled_ns: int, periods: int, quota: int | None = 20_000) -> None:
        folder = self.root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        if self.version == 2:
            (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} 100000\n")
            text = f"usage_usec 5\nnr_periods 9\nnr_throttled {periods}\nthrottled_usec {throttled_ns // 1000}\n"
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")
            text = f"nr_periods 9\nnr_throttled {periods}\nthrottled_time {throttled_ns}\n"
        (folder / "cpu.stat").write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_waits_and_quotas_are_of_the_window_and_of_any_group_above(tmp_path: Path, version: int) -> None:
    host = Host(tmp_path, version)
    host.rank(10, 1_000, "/pods/a/rank0")
    host.rank(11, 5_000, "/pods/b")
    host.group("/pods/a", 0, 0)  # the quota is above the group of the rank
    host.group("/pods/b", 0, 0, quota=None)
    cpu = Cpu(host.proc)
    cpu.set_ranks([(10, 1, 0), (11, 1, 1), (12, 1, 2)])  # of the last there is no file
    assert cpu.window(NOW) == {} and cpu.host is None
    host.rank(10, 1_000 + 300 * MS, "/pods/a/rank0")
    host.group("/pods/a", 400 * MS, 4)
    host.group("/pods/b", 900 * MS, 9, quota=None)
    host.host(busy=600, idle=300, steal=200, pressure_us=100_000)
    found = cpu.window(NOW + SECOND)
    assert found == {
        (10, 1): RankUse(0, 0.3, 0.4, 100 * MS, "/pods/a"),
        (11, 1): RankUse(1, 0.0, 0.0, 0, ""),
    }
    assert cpu.host is not None
    assert (cpu.host.stolen, cpu.host.ticks, cpu.host.pressure) == (0.25, 800, 0.1)
    # Of several processors together it may be more than the time: no more than the periods counts.
    host.group("/pods/a", 5400 * MS, 6)
    assert cpu.window(NOW + 2 * SECOND)[10, 1].throttled == pytest.approx(0.3)
    (host.proc / "11" / "schedstat").write_text("")  # it has ended
    assert set(cpu.window(NOW + 3 * SECOND)) == {(10, 1)}
    # Within five windows it is seen that a rank was moved.
    host.rank(10, 1_000 + 300 * MS, "/pods/b")
    assert cpu.window(NOW + 4 * SECOND)[10, 1].group == "/pods/a"
    assert cpu.window(NOW + 5 * SECOND)[10, 1].group == ""
    before = len(list(Path("/proc/self/fd").iterdir()))
    cpu.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 4


def test_hierarchies_and_groups_are_read_from_the_kernel_s_words() -> None:
    both = (
        "30 29 0:26 / /sys/fs/cgroup/cpu\\040x rw - cgroup cgroup rw,cpu\n"
        "31 29 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 29 0:28 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n"
        "33 29 0:28 /below /mnt rw - cgroup2 cgroup2 rw\n"
        "nonsense\n"
    )
    expected = [Controller(Path("/sys/fs/cgroup/cpu x"), 1), Controller(Path("/sys/fs/cgroup/unified"), 2)]
    assert controllers(both) == expected
    text = "4:memory:/m\n3:cpu,cpuacct:/a/b\n0::/c\n"
    assert (group_of(text, 1), group_of(text, 2)) == ("/a/b", "/c")
    assert group_of("0::/../../x\n", 2) is None and group_of("0::/a\n", 1) is None


# ---- paths ----

OTHER: Final = NetworkPath("h1", "h2", "10.9.0.2", "10.2.1.1", "rail2")


def delay(path: NetworkPath, queue_ns: int | None, at_ns: int = NOW, **changes: Any) -> PathDelay:
    queues = Histogram([20, 0, 0, 0, 0, 10, 20], 0)  # 20 of 50 probes waited for more than 50 µs
    forward = Delay(50, queueing_p50_ns=queue_ns, queueing_bound_ns=1_000, queueing_histogram=queues)
    known = {"path": path, "window_ns": SECOND, "forward": forward, "at_ns": at_ns, "received": 50, "lost": 0}
    return samples.path_delay(**known | changes)


def connection(path: NetworkPath, port: int, sent: int, **changes: Any) -> TcpFlow:
    given = {"path": path, "interface": path.interface, "local_port": port, "sent_bytes": sent, "at_ns": NOW}
    return samples.tcp_flow(**given | {"timeouts": 0, "stall": None} | changes)


def window(*told: tuple[TcpFlow, TcpFlow]) -> list[Sum]:
    traffic = Traffic()
    traffic.set_ranks({"job": [member(4711)]})
    for each in (*(first for first, _ in told), *(second for _, second in told)):
        traffic.take(connections(each))
    return traffic.window(NOW)


def grown(path: NetworkPath, port: int, sent: int, **changes: Any) -> tuple[TcpFlow, TcpFlow]:
    before = connection(path, port, 1000, segments_out=10, retransmitted_segments=1)
    return before, connection(path, port, 1000 + sent, **{"segments_out": 110, "retransmitted_segments": 3} | changes)


def test_what_connections_did_on_a_path_is_summed_without_control_connections() -> None:
    delays = Delays(SECOND)
    for path in (samples.path(), OTHER):
        delays.offer(Published(delay(path, 200_000)))
    told = [grown(samples.path(), port, 5_000_000) for port in range(1, 5)] + [grown(samples.path(), 9, 50_000)]
    used = {each.path: each for each in paths.uses(window(*told), delays, SECOND, NOW)}
    own, other = used[samples.path()], used[OTHER]
    assert (own.connections, own.sent_bytes, own.segments, own.retransmitted) == (4, 20_000_000, 500, 10)
    assert own.busy is not None and own.busy.value == 0.4
    assert own.busy.low == pytest.approx(0.276, abs=1e-3) and own.busy.high == pytest.approx(0.538, abs=1e-3)  # Wilson
    assert (own.queue_ns, own.queue_bound_ns, own.settled, own.usual_queue_ns) == (200_000, 1_000, 50, None)
    assert (other.connections, other.busy, other.queue_ns) == (0, own.busy, 200_000)  # a path that the job could use


def test_waits_for_the_timer_are_of_the_connection_that_waited_longest() -> None:
    some = grown(samples.path(), 1, 1000, timeouts=1, srtt_ns=20 * MS)
    worse = grown(samples.path(), 2, 1000, timeouts=0, stall=Stall(2, 400 * MS, 600 * MS))
    (use,) = paths.uses(window(some), Delays(SECOND), SECOND, NOW)
    assert use.timeouts == 1 and use.stalled is not None
    assert (use.stalled.low, use.stalled.value, use.stalled.high) == (0.02, 0.2, 0.2)
    (use,) = paths.uses(window(some, worse), Delays(SECOND), SECOND, NOW)
    assert use.stalled is not None and use.stalled.value == 0.6


def test_queue_pairs_that_are_congested_count_where_they_are_half_of_all() -> None:
    slow = Bandwidth(8, 5, 2_000, 8_000, 1_000, 9_000, 5)
    bad = samples.rdma_qp(verdict="congested", reason="low", bandwidths=[slow], path=samples.path(), closed=False)
    well = samples.rdma_qp(number=9, verdict="ok", path=samples.path(), closed=False)
    whole = Sum(("job", samples.path(), "rail1"), pairs=[bad, well])
    (use,) = paths.uses([whole], Delays(SECOND), SECOND, NOW)
    assert (
        use.troubled is not None and use.troubled.value == 0.75 and "1 of 2 queue pairs congested" in use.pairs_reason
    )
    few = Sum(("job", samples.path(), "rail1"), pairs=[bad, well, well])
    (use,) = paths.uses([few], Delays(SECOND), SECOND, NOW)
    assert use.troubled is None and use.pairs == 3


def test_delays_that_are_old_or_of_short_windows_say_nothing() -> None:
    delays = Delays(SECOND)
    delays.offer(Published(delay(OTHER, 5, window_ns=SECOND // 10)))
    assert delays.of(OTHER, NOW) is None
    for turn in range(40):
        delays.offer(Published(delay(OTHER, 1000 * turn, NOW + turn * SECOND)))
    last = NOW + 39 * SECOND
    assert delays.of(OTHER, last + 2 * SECOND) is not None and delays.of(OTHER, last + 4 * SECOND) is None
    assert delays.usual(OTHER) == 19_500 and delays.siblings(samples.path(), last) == [OTHER]
    delays.offer(Published(samples.path_state(path=OTHER, state="drained", at_ns=last)))
    assert delays.is_left(OTHER, last) and not delays.is_left(OTHER, last + 6 * SECOND)


# ---- GPUs ----


def gpu(**changes: Any) -> Published:
    """A GPU on which process 4711 computes, without faults."""
    none: dict[str, Any] = {"ecc_uncorrected": 0, "pcie_replays": None, "xids": [], "links": [], "clock_reasons": []}
    return Published(samples.gpu(**none | {"gpu": 3, "sm_mhz": 1979.6} | changes))


def test_a_gpu_belongs_to_the_rank_whose_process_uses_it_or_that_ras_says(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path / "nvidiactl")
    assert gpus.of({0: [4711]}, {}, NOW) == ([], "")  # no GPU on this host
    gpus.offer(gpu(xids=[79], ecc_uncorrected=2))
    gpus.offer(gpu(gpu=4, processes=[]))
    found, why = gpus.of({0: [1, 4711], 1: [5], 2: [6]}, {1: 4}, NOW)
    assert [(each.rank, each.index, each.clock_mhz) for each in found] == [(0, 3, 1980), (1, 4, 1980)]
    assert found[0].faults == {"uncorrected ECC errors": 2, "XID 79": 1}
    assert mentions(why, "GPUs", "ranks 2", "not known")
    (tmp_path / "nvidiactl").touch()
    found, why = Gpus(tmp_path / "nvidiactl").of({0: [4711]}, {}, NOW)
    assert found == [] and mentions(why, "no recent reading", "GPU")
    assert gpus.of({0: [4711]}, {}, NOW + 4 * SECOND)[0] == []  # stale


def test_what_answers_as_ras_cannot_give_a_rank_the_gpu_of_another(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path / "nvidiactl")
    gpus.offer(gpu(processes=[4711]))
    gpus.offer(gpu(gpu=4, processes=[4712], sm_mhz=500.0))
    found, why = gpus.of({0: [4711], 1: [4712], 2: [4713]}, {0: 4, 1: 3, 2: 4}, NOW)
    assert [(each.rank, each.index) for each in found] == [(0, 3), (1, 4)]
    assert mentions(why, "GPUs", "ranks 2", "not known")


def test_all_that_the_verdict_uses_of_a_gpu_comes_from_its_signal(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path / "nvidiactl")
    gpus.offer(Published(samples.gpu()))
    gpus.offer(gpu(state="hung", sm_mhz=None))
    found, _ = gpus.of({0: [4711]}, {}, NOW)
    faults = {"uncorrected ECC errors": 1, "PCIe replays": 3, "NVLink errors": 4, "XID 48": 1}
    assert found == [
        GpuUse(0, 0, 1755, 1980, 0.97, {"sw_power_cap": 0.8}, faults),
        GpuUse(0, 3, None, 1980, 0.97, {}, {"calls that hang": 1}),
    ]


def test_what_brakes_a_gpu_has_the_names_of_its_signal() -> None:
    assert set(GPU_REASONS) >= job_causes.BRAKES | {"application_clocks", "idle"}


# ---- together ----


def test_what_is_missing_is_said_and_no_job_is_healthy_then(tmp_path: Path) -> None:
    host = Host(tmp_path, 2)
    host.rank(4711, 0, "/a")
    place = Place("env", "", "env:n1:1", False, 0, 2, None, "", "")
    members = [Member(place, Owner(4711, "py", "/a"), 1000, 5, 4711, 0)]
    verdicts = Verdicts(SECOND, host.proc)
    verdicts.set_ranks({"job": members})

    def judge(sums: list[Sum], at_ns: int) -> Any:
        verdicts.window(at_ns)
        return verdicts.of("job", members, sums, {}, SECOND, at_ns)

    found = judge([], NOW)
    assert found.verdict == "unknown" and set(found.missing) == {"rhythm", "ranks", "network", "host"}
    found = judge(window(*(grown(samples.path(), port, 5_000_000) for port in range(1, 5))), NOW + SECOND)
    assert set(found.missing) == {"ranks", "network"} and "no recent probes of h2 by rail1" in found.missing["network"]
    assert found.step is not None and (found.step.source, found.step.steps, found.step.flow_bps) == ("tcp", 4, 4e7)
    verdicts.offer(Published(delay(samples.path(), 200_000, NOW + 2 * SECOND)))
    found = judge(window(*(grown(samples.path(), port, 5_000_000) for port in range(1, 5))), NOW + 2 * SECOND)
    assert set(found.missing) == {"ranks"} and found.verdict == "unknown"
    verdicts.forget()
