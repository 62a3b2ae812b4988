"""Why there is nothing to show, in words, and what to do about it. Pure."""

from __future__ import annotations

from pytools import directories
from pytools.signals import Clock, ClockEdge, PathDelay, RdmaSight
from pytools.views.model import Model

_WINDOW = "a first result takes a window (clocks.window, 2 s by default) after the agents at both ends have started"


def no_clocks(model: Model) -> str:
    return _not_compared(model, "no clock has been compared")


def no_others(model: Model) -> str:
    """Why no clock but this host's is known."""
    return _not_compared(model, "no other clock has been compared with this one")


def no_edges(model: Model) -> str:
    """Why no peer's clock is known."""
    return _not_compared(model, "no peer's clock has been compared with ours")


def _not_compared(model: Model, what: str) -> str:
    if model.of(ClockEdge):
        return (
            f"{model.host}: clocks are compared with the peers' (swerve clocks --edges), but not put together yet: "
            "that takes a second; if it stays so, look whether `swerve self` counts clock messages that were refused"
        )
    if not model.of(PathDelay):
        return f"{model.host}: {what}, and no path is probed: the agent's configuration names no peer that has a route"
    states = {delay.clock for delay in model.of(PathDelay).values()}
    if states == {"synchronised"}:
        return (
            f"{model.host}: {what}: the configuration says that all peers read the same clock as this host "
            "(clock: shared), so there is nothing to compare; take that line out where hosts have their own clocks"
        )
    if any(delay.received for delay in model.of(PathDelay).values()):
        return (
            f"{model.host}: {what} yet: {_WINDOW}; if it stays so, look whether `swerve self` counts probes without "
            "stamps, and whether the peer's agent answers with stamps of its kernel"
        )
    return f"{model.host}: {what}: no probe is answered; start the agents of the peers (swerve agent), see swerve delay"


def no_collocation(model: Model) -> str:
    """Why nothing is known about oscillators."""
    if len(model.of(Clock)) > 1:
        return (
            f"{model.host}: nothing is said about oscillators yet: it takes a minute or two of drifts of at least two "
            "hosts; come back, or let it go on with -i 10"
        )
    return no_clocks(model)


def no_app_delays(model: Model) -> str:
    """Why no application packet was timed."""
    return (
        f"{model.host}: no application packet was timed at both ends: it takes TCP or UDP traffic from here to a peer, "
        "samples.enabled at both ends, and agents that talk to each other "
        f"(bus.key_file; {directories.page('config.md')})"
    )


def no_ways(model: Model) -> str:
    """Why no way behind a first hop is known."""
    return (
        f"{model.host}: no path is known to have several ways: either none has more than one router or leaves by a "
        f"balanced bond, or the search is not done yet, or probe.sweep_per_s is 0 ({directories.page('probes.md')})"
    )


def no_rdma(model: Model) -> str:
    """Why nothing of RDMA is seen on this host; empty where it is."""
    sight = model.one(RdmaSight)
    if sight is None:
        return f"{model.host}: the agent has not said what it sees of RDMA; see `swerve self` and `swerve doctor`"
    if not sight.available:
        return f"{model.host}: no RDMA is seen here: {sight.reason or 'no reason given'}; `swerve doctor` has the steps"
    return ""


def no_queue_pairs(model: Model) -> str:
    """Why there is no queue pair although RDMA is there."""
    sight = model.one(RdmaSight)
    how = sorted({f"{process}: {seen}" for process, seen in sight.seen.items()}) if sight is not None else []
    seen = f" (seen: {'; '.join(how)})" if how else ""
    return (
        f"{model.host}: no queue pair has posted anything while this looked{seen}; a program that posts a lot is best "
        "started with `swerve rdma tap -- COMMAND`"
    )


def no_jobs(model: Model) -> str:
    """Why no job is known."""
    return (
        f"{model.host}: no process here is a rank of a job by its environment: started by torchrun, Slurm or MPI "
        f"({directories.page('jobs.md')}); an agent without CAP_SYS_PTRACE does not see other users' processes"
    )


def no_gpus(model: Model) -> str:
    """Why no GPU is known."""
    return (
        f"{model.host}: no GPU is known: NVIDIA's driver is not loaded, `gpu.enabled` is false, or NVML has not "
        f"answered yet; `swerve self` and `swerve doctor` say what failed ({directories.page('gpu.md')})"
    )


def no_drops(model: Model) -> str:
    """Why nothing is known of packets that the kernel drops."""
    return f"{model.host}: nothing is known of packets that the kernel drops; `swerve doctor` says what it takes"


def no_links(model: Model) -> str:
    """Why no interface is known."""
    if not model.of(PathDelay):
        return f"{model.host}: no interface carries a path: the agent's configuration names no peer that has a route"
    return f"{model.host}: the agent has said nothing of its interfaces; see `swerve self` and `swerve doctor`"
