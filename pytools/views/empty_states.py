"""Why there is nothing to show, in words, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pytools import directories
from pytools.signals import Clock, ClockEdge, PathDelay, RdmaSight
from pytools.views.model import Model

_WINDOW = "a first result takes a window (clocks.window, 2 s by default) after the agents at both ends have started"


def _fixed(text: str, page: str = "") -> Callable[[Model], str]:
    """What is said whatever is known; `{page}` is where that page of the documents is."""
    return lambda model: f"{model.host}: {text.replace('{page}', directories.page(page))}"


no_app_delays: Final = _fixed(
    "no application packet was timed at both ends: it takes TCP or UDP traffic from here to a peer, samples.enabled at "
    "both ends, and agents that talk to each other (bus.key_file; {page})",
    "config.md",
)
no_ways: Final = _fixed(
    "no path is known to have several ways: either none has more than one router or leaves by a balanced bond, or the "
    "search is not done yet, or probe.sweep_per_s is 0 ({page})",
    "probes.md",
)
no_jobs: Final = _fixed(
    "no process here is a rank of a job by its environment: started by torchrun, Slurm or MPI ({page}); an agent "
    "without CAP_SYS_PTRACE does not see other users' processes",
    "jobs.md",
)
no_gpus: Final = _fixed(
    "no GPU is known: NVIDIA's driver is not loaded, `gpu.enabled` is false, or NVML has not answered yet; "
    "`swerve self` and `swerve doctor` say what failed ({page})",
    "gpu.md",
)
no_drops: Final = _fixed("nothing is known of packets that the kernel drops; `swerve doctor` says what it takes")


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


def no_links(model: Model) -> str:
    """Why no interface is known."""
    if not model.of(PathDelay):
        return f"{model.host}: no interface carries a path: the agent's configuration names no peer that has a route"
    return f"{model.host}: the agent has said nothing of its interfaces; see `swerve self` and `swerve doctor`"
