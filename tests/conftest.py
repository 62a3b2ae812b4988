"""Fixtures of every tier, and the rules that hold for a whole run.

Run as root, a session gets its own view of /run/netns and its own runtime and state directories
(SWERVE_TEST_ISOLATION=0 switches that off): sessions meet neither each other nor a swerve in use on the
machine, and the namespaces of a killed session vanish with it. At the end nothing may be left: see
`nothing_left_behind`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import itertools
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import leaks
import pytest
import support

ROOT_TIERS = ("kernel", "fabric", "vm")
DEADLINE_S, CLEAN_UP_S = 120.0, 30.0
CACHE_VARIABLE = "SWERVE_TEST_CACHE"  # where the sessions of one run keep what they compile; else each has its own
BEGUN_VARIABLE = "SWERVE_TEST_BEGUN"  # where sessions that share files note which of them they have begun
SPARE_VARIABLE = "SWERVE_TEST_SPARE"  # set: this session has the processor time that others leave,
_SPARE_NICE = 10  # and a tenth of theirs: with none, what a test waits for would not come in time
CLONE_NEWNS = 0x0002_0000
MS_REC, MS_PRIVATE = 0x4000, 0x40000

# Random examples of a test that does not say how many. One that waits for the disk, or for a processor, is no failure:
# by itself Hypothesis allows each 200 ms.
EXAMPLES = {"untimed": 30, "quick": 10, "many": 1000}  # make test, test-quick, prove NAME=random_examples
if "SWERVE_GUEST_RESULTS" not in os.environ:  # no test in the guest has examples, and the import takes a second there
    from hypothesis import HealthCheck, settings

    for _name, _examples in EXAMPLES.items():
        settings.register_profile(
            _name, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=_examples
        )
    settings.load_profile("untimed")

_ENDING_S = 2.0
_numbers = itertools.count(1)
_directory = pytest.StashKey[Path]()
_begun = pytest.StashKey[Path | None]()
_shared = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the session its own directories and, as root, its own list of named namespaces."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # asked to end, it cleans up as when it is interrupted
    os.environ[leaks.SESSION_VARIABLE] = uuid.uuid4().hex
    begun = os.environ.pop(BEGUN_VARIABLE, None)  # sessions that tests start share nothing
    config.stash[_begun] = Path(begun) if begun else None
    if os.environ.get("SWERVE_TEST_ISOLATION") == "0":
        return
    directory = Path(tempfile.mkdtemp(prefix="swerve-tests-"))
    config.stash[_directory] = directory
    os.environ["SWERVE_RUNTIME_DIR"] = str(directory / "run")
    os.environ["SWERVE_STATE_DIR"] = str(directory / "state")
    cache = Path(os.environ.setdefault(CACHE_VARIABLE, str(directory / "cache")))
    os.environ["SWERVE_CACHE_DIR"] = str(cache)
    cache.mkdir(exist_ok=True)
    cache.chmod(0o1777)  # agents that run as another user keep there as well what they compile
    if "SWERVE_GUEST_COMPILED" in os.environ:
        shutil.copytree(os.environ["SWERVE_GUEST_COMPILED"], cache / f"compiled.{os.geteuid()}")
    if os.geteuid() == 0:
        try:
            _own_namespaces()
        except OSError as error:  # in a plain chroot, for one: the root is no mount there
            config.stash[_shared] = str(error)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect while no other session of the run does: what the first has rewritten and compiled, the others load.

    No collection of garbage looks through thousands of tests, now or later.
    """
    begun = session.config.stash[_begun]
    gc.disable()
    with contextlib.ExitStack() as stack:
        if begun is not None:
            fcntl.flock(stack.enter_context((begun / "collecting").open("w")), fcntl.LOCK_EX)
        result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_finish() -> None:
    """Let other sessions go first from here on, where that is wanted: they have waited for the collection."""
    if os.environ.pop(SPARE_VARIABLE, None):
        os.nice(_SPARE_NICE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of what only the guest's kernel has to the guest, and to tests/vm, which lists them by their mark."""
    if "SWERVE_GUEST_RESULTS" in os.environ:
        return
    if config.option.markexpr == "guest":
        elsewhere = _not_sampled(items) if os.environ.get("SWERVE_GUEST") != "all" else []
    else:
        elsewhere = [item for item in items if any(mark.kwargs.get("only") for mark in item.iter_markers("guest"))]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]


def _not_sampled(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests marked `guest(thorough=True)`, and of `guest(every=n)` the cases that are no n-th one: a guest is slow.

    The closest mark holds. Each test begins with another case than the one before it, so that none, of IPv6 say, is
    left out everywhere.
    """
    left_out: list[pytest.Item] = []
    cases: dict[str, list[pytest.Item]] = {}
    every: dict[str, int] = {}
    for item in items:
        mark, test = item.get_closest_marker("guest"), item.nodeid.partition("[")[0]
        if mark is None or mark.kwargs.get("thorough"):
            left_out.append(item)
        else:
            cases.setdefault(test, []).append(item)
            every.setdefault(test, mark.kwargs.get("every", 1))
    for number, (test, alike) in enumerate(cases.items()):
        taken = alike[number % min(every[test], len(alike)) :: every[test]]
        left_out += [item for item in alike if item not in taken]
    return left_out


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Of files that several sessions are given (scripts/run_tests.py), run those that no other has begun."""
    begun = session.config.stash[_begun]
    if begun is None or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop
    items = support.not_begun(session.items, begun)
    item = next(items, None)
    while item is not None:
        following = next(items, None)  # pytest tears down what this one does not use
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            raise session.Interrupted(session.shouldfail or session.shouldstop)
        item = following
    return True


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say so when the session shares its list of namespaces with the machine."""
    reason = config.stash.get(_shared, None)
    return f"named namespaces are shared with the machine: {reason}" if reason else None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's directories."""
    directory = config.stash.get(_directory, None)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def _own_namespaces() -> None:
    """Detach this process's mounts from the machine's and put an empty file system over /run/netns."""
    libc = ctypes.CDLL(None, use_errno=True)
    Path("/run/netns").mkdir(exist_ok=True)

    def checked(result: int, what: str) -> None:
        if result != 0:
            raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")

    checked(libc.unshare(CLONE_NEWNS), "unshare of the mount namespace")
    checked(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "private mounts")
    checked(libc.mount(b"tmpfs", b"/run/netns", b"tmpfs", ctypes.c_ulong(0), None), "tmpfs on /run/netns")


_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


def _judged(report: _Report) -> _Report:
    """Turn a skip into a failure where skips are forbidden; an expected failure stays what it is."""
    forbidden = os.environ.get("SWERVE_FORBID_SKIPS") == "1"
    if forbidden and report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        report.outcome = "failed"
        report.longrepr = f"skipped although SWERVE_FORBID_SKIPS=1: {report.longrepr[2]}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """No test waits for ever: past its deadline it fails where it stands, and its fixtures still clean up."""
    mark = item.get_closest_marker("deadline")
    # Where a processor is emulated all tests share one limit (tests/vm): one that hangs must end well before it.
    slower = min(support.slow_factor(), 3.0)
    seconds = (mark.args[0] if mark else DEADLINE_S) * slower

    def expired(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, CLEAN_UP_S * slower)  # clean-up may hang as well
        pytest.fail(f"the test was not done after {seconds:g} s", pytrace=True)

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _needs_of_the_tier(request: pytest.FixtureRequest) -> None:
    """Every tier but `unit` works on the kernel, so it needs root."""
    tier = request.path.relative_to(Path(__file__).parent).parts[0]
    if tier in ROOT_TIERS:
        support.require("root")


@pytest.fixture(scope="session")
def unique_name() -> Callable[[], str]:
    """Names that no other running session uses, short enough for an interface or a lab."""
    return lambda: f"t{os.getpid()}x{next(_numbers)}"


@pytest.fixture
def make_namespace(unique_name: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """Make network namespaces (loopback up) by the call; all are removed at the end, whatever happened."""
    with _namespaces(unique_name) as make:
        yield make


@contextlib.contextmanager
def _namespaces(unique_name: Callable[[], str]) -> Iterator[Callable[[], str]]:
    support.require("netns")
    from pytools.kernel.netns import inside
    from pytools.lab import namespaces

    made: list[str] = []

    def make() -> str:
        name = f"swerve-{unique_name()}"
        namespaces.create(name)
        made.append(name)
        with inside(name):
            support.bring_up("lo")
            # Nobody else is on a cable that was just made: no second or two of looking for one.
            Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0")
        return name

    try:
        yield make
    finally:
        stayed = {name: _kill_inside(name) for name in made}
        for name in made:
            namespaces.delete(name)
    left = {name: pids for name, pids in stayed.items() if pids}
    assert not left, f"processes still ran in the test's namespaces (killed now): {left}"


@pytest.fixture
def namespace(make_namespace: Callable[[], str]) -> str:
    """One fresh network namespace by name, loopback up."""
    return make_namespace()


@pytest.fixture
def veth_pair(make_namespace: Callable[[], str]) -> tuple[str, str]:
    """Two fresh namespaces joined by a veth pair: `v0` in each, up, 10.77.0.{1,2}/24 and fd77::{1,2}/64."""
    return _joined(make_namespace(), make_namespace())


@pytest.fixture(scope="module")
def make_lasting_namespace(unique_name: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """As `make_namespace`, for all tests of a module."""
    with _namespaces(unique_name) as make:
        yield make


@pytest.fixture(scope="module")
def lasting_veth_pair(make_lasting_namespace: Callable[[], str]) -> tuple[str, str]:
    """As `veth_pair`, for all tests of a module."""
    return _joined(make_lasting_namespace(), make_lasting_namespace())


def _joined(first: str, second: str) -> tuple[str, str]:
    for host, (name, joining) in enumerate(((first, [support.joining(second, "v0")]), (second, [])), start=1):
        addresses = [f"address add 10.77.0.{host}/24 dev v0", f"address add fd77::{host}/64 dev v0 nodad"]
        support.ip(name, *joining, *addresses, "link set v0 up")
    for name in (first, second):
        support.wait_for_own_routes(name, "v0")  # what a test finds there does not become more by itself
    return first, second


def _kill_inside(name: str) -> list[str]:
    """Kill what still runs in a namespace of ours, except this process; says what it was.

    What ends with a process that was killed does so a moment later.
    """
    wanted = Path("/run/netns", name).stat()

    def inside() -> list[int]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.path.samestat((place / "ns/net").stat(), wanted) and int(place.name) != os.getpid():
                    found.append(int(place.name))
        return found

    end_s, left, killed = time.monotonic() + _ENDING_S, inside(), []
    while left and time.monotonic() < end_s:
        time.sleep(0.02)
        left = inside()
    for pid in left:
        killed.append(f"{pid} {leaks.command_line(pid)}")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return killed


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """The session ends as it began: nothing it made is left on the machine."""
    before = leaks.inventory()
    yield
    left = leaks.inventory() - before
    assert not left, "left behind by the tests:\n" + "\n".join(sorted(left))
