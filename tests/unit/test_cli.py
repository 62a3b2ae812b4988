"""The commands as a person or a program meets them: a real process, a real socket, signals made to order."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
import samples
from click.testing import CliRunner
from serving import Served
from support import ROOT, SWERVE, mentions, wait_until

from pytools import cli, cli_tables, signals
from pytools.errors import PolicyError, RefusedError, SwerveError

pytestmark = pytest.mark.slow

NETNS = "swerve-t-h1"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    one = Served(tmp_path / NETNS / "agent.sock")
    yield one
    one.close()


def publish_all(served: Served) -> None:
    for each in samples.one_of_each():
        served.bus.publish(each)


@dataclass(frozen=True)
class Command:
    """A command line, the agent that it meets, and what that tells whenever somebody listens."""

    served: Served
    words: str
    publish: Callable[[Served], None] = publish_all


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it wrote."""

    code: int
    out: bytes
    err: bytes


def feed(served: Served, process: subprocess.Popen[bytes], publish: Callable[[Served], None]) -> None:
    """Turn the agent's loop, publishing whenever somebody listens, until the process ends."""

    def ended() -> bool:
        served.turn(0.02)
        if served.server.clients:
            publish(served)
        return process.poll() is not None

    wait_until(ended, 30, "the command ends", every_s=0)


def run_together(commands: Sequence[Command]) -> list[Ended]:
    """Run them side by side until all have ended: most of their time is waiting for one another."""
    agents = {each.served: each.publish for each in commands}
    with contextlib.ExitStack() as stack:
        outs, errs = ([stack.enter_context(tempfile.TemporaryFile()) for _ in commands] for _ in range(2))
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*SWERVE, *each.words.split(), "-n", NETNS],
                    cwd=ROOT,
                    env={**os.environ, "SWERVE_RUNTIME_DIR": str(each.served.path.parent.parent)},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            )
            for each, out, err in zip(commands, outs, errs, strict=True)
        ]

        def ended() -> bool:
            for served, publish in agents.items():
                served.turn(0.02 / len(agents))
                if served.server.clients and not served.server.unsent:  # no reader is overrun on a busy machine
                    publish(served)
            return all(process.poll() is not None for process in processes)

        wait_until(ended, 60, "the commands end", every_s=0)

        def written(file: IO[bytes]) -> bytes:
            file.seek(0)
            return file.read()

        return [
            Ended(process.returncode, written(out), written(err))
            for process, out, err in zip(processes, outs, errs, strict=True)
        ]


def run(served: Served, *arguments: str, publish: Callable[[Served], None] = publish_all) -> tuple[int, bytes, bytes]:
    (ended,) = run_together([Command(served, " ".join(arguments), publish)])
    return ended.code, ended.out, ended.err


def decoded(out: bytes) -> list[signals.AnySignal]:
    """Every line is a signal, and the last one is whole."""
    assert out.endswith(b"\n")
    return [signals.decode(line) for line in out.splitlines()]


def test_watch_prints_a_signal_a_line(served: Served) -> None:
    code, out, err = run(served, "watch", "--count", "20")
    assert (code, err) == (0, b"")
    assert decoded(out) == (samples.one_of_each() * 3)[:20]


def test_watch_can_be_narrowed(served: Served) -> None:
    code, out, _ = run(served, "watch", "--type", "act", "--type", "self", "-c", "5")
    assert code == 0
    assert {type(each) for each in decoded(out)} == {signals.Act, signals.Self}


@pytest.mark.parametrize("kind", ["clock", "clock_edge", "collocation", "app_delay", "tcp_host", "link", "rdma_sight"])
def test_watch_knows_every_type(served: Served, kind: str) -> None:
    code, out, _ = run(served, "watch", "--type", kind, "-c", "2")
    assert code == 0
    assert {each.__struct_config__.tag for each in decoded(out)} == {kind}


def test_watch_ends_quietly_when_nobody_reads_any_more(served: Served) -> None:
    for publish in (publish_all, lambda _: None):  # while signals come, and while none do
        with subprocess.Popen(
            [*SWERVE, "watch", "-n", NETNS], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            served.until(lambda: served.bus.wanted("act"), "watch listens")
            publish_all(served)
            served.turn(0.1)
            assert signals.decode(process.stdout.readline()) == samples.path_delay()
            process.stdout.close()
            feed(served, process, publish)
            assert process.stderr.read() == b""
        assert process.returncode == 0


def test_watch_says_on_standard_error_what_it_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    narrow = Served(tmp_path / NETNS / "agent.sock", queue_bytes=2000)
    published = 0

    def burst(served: Served) -> None:
        nonlocal published
        if published == 0 and served.bus.wanted("tcp_path"):
            # Until the reader has fallen behind, however fast it is.
            while published < 5000 or (served.server.drops()["bus_slow"] == 0 and published < 1_000_000):
                served.bus.publish(samples.tcp_path(at_ns=published))
                published += 1
        elif published and not served.server.unsent:
            served.server.close()  # everything is on its way

    code, out, err = run(narrow, "watch", publish=burst)
    narrow.close()
    dropped = narrow.server.drops()["bus_slow"]
    assert dropped > 0 and len(decoded(out)) + dropped == published
    assert f"{dropped} signals dropped so far".encode() in err
    assert code == 1 and b"closed the connection" in err


VIEWS = [
    ("delay", [samples.path_delay(), samples.path_liveness()]),
    ("delay --app", [samples.app_delay()]),
    ("clocks", [samples.clock()]),
    ("clocks --edges", [samples.clock_edge()]),
    ("clocks --collocation", [samples.collocation()]),
    ("tcp", [samples.tcp_host(), samples.tcp_path(), samples.tcp_namespace(), samples.tcp_flow()]),
    ("tcp --pod SHOP/", [samples.tcp_namespace()]),
    ("tcp --flows", [samples.tcp_flow()]),
    ("tcp --port 5201", [samples.tcp_flow()]),
    ("tcp --dst 10.9.0.0/16", [samples.tcp_path(), samples.tcp_flow()]),
    ("drops", [samples.packet_drops()]),
    ("links", [samples.link(), samples.path_mtu(), samples.path_ecn(), samples.link_event()]),
    ("links --events", [samples.link_event()]),
    ("rdma", [samples.rdma_sight(), samples.rdma_qp(), samples.rdma_suspects()]),
    ("rdma --verdict ok --sort bandwidth", [samples.rdma_qp()]),
    ("rdma --ports", [samples.rdma_port()]),
    ("rdma --suspects", [samples.rdma_suspects()]),
    ("jobs", [samples.job()]),
    ("jobs --job slurm --pod ml/ --dst 10.9.0.0/16 --sort lag", [samples.job()]),
    ("self", [samples.self_cost()]),
    ("top", [samples.path_delay(), samples.tcp_path(), samples.nexthop_group(), samples.path_state()]),
]


def nothing(_served: Served) -> None:
    pass


def shared(served: Served) -> None:
    served.bus.publish(samples.path_delay())


def young(served: Served) -> None:
    served.bus.publish(samples.path_delay(clock="free_running"))


# A command that waits in vain waits for five seconds, and most views wait for one: they all do so at the same time.
PATIENT = {"silent": ("delay", nothing), "shared": ("clocks", shared), "young": ("clocks --edges -j", young)}


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """What each view told as JSON, and what those said whose agent had little to tell."""
    with contextlib.ExitStack() as stack:

        def agent() -> Served:
            return stack.enter_context(
                contextlib.closing(Served(tmp_path_factory.mktemp("agent") / NETNS / "agent.sock"))
            )

        telling = agent()
        wanted = {words: Command(telling, f"{words} -j -c 1") for words, _ in VIEWS}
        wanted |= {name: Command(agent(), words, publish) for name, (words, publish) in PATIENT.items()}
        yield dict(zip(wanted, run_together(list(wanted.values())), strict=True))


@pytest.mark.parametrize(("command", "expected"), VIEWS)
def test_json_of_each_view_is_the_signals_behind_it(
    views: dict[str, Ended], command: str, expected: list[signals.AnySignal]
) -> None:
    ended = views[command]
    assert (ended.code, ended.err) == (0, b"")
    got = decoded(ended.out)
    assert got[: len(expected)] == expected
    assert command == "top" or len(got) == len(expected)


def test_following_shows_one_frame_per_interval(served: Served) -> None:
    code, out, _ = run(served, "delay", "-j", "-i", "0.05", "-c", "4")
    assert code == 0
    assert decoded(out) == [samples.path_delay(), samples.path_liveness()] * 4


def test_a_table_in_a_pipe_is_plain_text_and_not_cut(served: Served) -> None:
    commands = (
        *("delay", "delay --app", "clocks", "clocks --edges", "clocks --collocation", "tcp", "tcp --flows", "drops"),
        *("links", "links --events", "rdma", "rdma --ports", "rdma --suspects", "jobs", "self", "top -c 1"),
    )
    for words, ended in zip(commands, run_together([Command(served, words) for words in commands]), strict=True):
        text = ended.out
        assert ended.code == 0
        assert text and b"\x1b" not in text
        assert "…".encode() not in text or words is commands[-1]
    assert text.count(b"swerve h1") == 1
    assert b"rail1" in text


def test_a_silent_agent_is_an_error_with_a_next_step(views: dict[str, Ended]) -> None:
    ended = views["silent"]
    assert (ended.code, ended.out) == (1, b"")
    assert ended.err.startswith(b"swerve: the agent published no path_delay or path_liveness within 5 s; ")


@pytest.mark.parametrize(("agent", "said"), [("shared", b"(clock: shared)"), ("young", b"takes a window")])
def test_an_agent_with_nothing_to_tell_is_explained(views: dict[str, Ended], agent: str, said: bytes) -> None:
    ended = views[agent]
    assert ended.code == 0
    shown, other = (ended.err, ended.out) if "-j" in PATIENT[agent][0] else (ended.out, ended.err)
    assert said in shown and other == b""


@pytest.mark.parametrize(
    ("command", "options"), [("clocks", ["--edges", "--collocation"]), ("rdma", ["--ports", "--suspects"])]
)
def test_a_command_shows_one_table_at_a_time(command: str, options: list[str]) -> None:
    by_name = {each.name: each for each in cli.commands}
    shown = CliRunner().invoke(by_name[command], options)
    assert shown.exit_code == 2 and "mutually exclusive" in shown.output


def many(served: Served) -> None:
    for number, verdict in enumerate(("ok", "dead", "congested")):
        served.bus.publish(samples.rdma_qp(number, verdict=verdict))
    served.bus.publish(samples.rdma_sight())


def test_filters_and_order_are_alike_in_json_and_in_the_table(served: Served) -> None:
    wanted = "rdma --verdict ok --verdict dead --sort verdict --dst 10.9.0.0/16"
    machine, person = run_together([Command(served, f"{wanted} -j", many), Command(served, wanted, many)])
    assert machine.code == 0 and decoded(machine.out) == [samples.rdma_qp(1, verdict="dead"), samples.rdma_qp(0)]
    text = person.out.decode()
    assert person.code == 0 and text.index("qp 1 ") < text.index("qp 0 ") and "qp 2 " not in text


def test_that_nothing_passes_is_said_apart_from_the_json(served: Served) -> None:
    code, out, err = run(served, "rdma", "--verdict", "no_demand", "-j", publish=many)
    assert (code, out) == (0, b"") and err == b"swerve: h1: nothing passes --verdict no_demand\n"


def test_there_being_no_rdma_is_no_failure(served: Served) -> None:
    none = samples.rdma_sight(available=False, reason="the kernel has no RDMA")
    code, out, err = run(served, "rdma", publish=lambda served: served.bus.publish(none))
    assert (code, err) == (0, b"") and b"no RDMA is seen here: the kernel has no RDMA" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tcp --dst 10.9.0.0/33", "neither an address nor a prefix"),
        ("tcp --sort rtx", "did you mean retx?"),
        ("links --interface a/b", "cannot be the name"),
        ("rdma --ports --pid 7", "it can be narrowed with --interface"),
        ("rdma --verdict congestd", "did you mean congested?"),
        ("drops --sort x", "there are: reason, window, total"),
    ],
)
def test_what_cannot_be_asked_is_said_before_any_agent_is(
    arguments: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name, *rest = arguments.split()
    by_name = {each.name: each for each in cli.commands}
    assert cli.run(by_name[name], [*rest, "-n", "nobody"]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("separator", [["--"], []])
def test_the_tap_gets_the_command_as_it_stands(separator: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from pytools.sources.rdma import tap_command

    asked: list[tuple[list[str], str | None]] = []

    def run_tapped(arguments: list[str], netns: str | None) -> int:
        asked.append((arguments, netns))
        return 7

    monkeypatch.setattr(tap_command, "run", run_tapped)
    words = ["ib_write_bw", "-d", "rxe0", "--iters", "5", "-n", "3", "--", "h2"]
    assert cli.run(cli_tables.rdma, ["tap", "-n", "lab-h1", *separator, *words]) == 7
    assert asked == [(words, "lab-h1")]
    assert cli.run(cli_tables.rdma, ["tap"]) == 2


def test_without_an_agent_the_error_names_the_next_step(tmp_path: Path) -> None:
    for command in ("delay", "clocks", "tcp", "drops", "links", "rdma", "jobs", "self", "watch", "top"):
        done = subprocess.run(
            [*SWERVE, command, "-n", "nobody"],
            cwd=ROOT,
            env={**os.environ, "SWERVE_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1 and done.stdout == ""
        assert mentions(done.stderr, "swerve", "no agent", f"{tmp_path}/nobody/agent.sock", "swerve agent -n nobody")


@pytest.mark.parametrize(
    "command", [each for each in cli.commands if each.name not in ("lab", "schema")], ids=lambda each: each.name
)
def test_every_command_has_help_with_an_example(command: object) -> None:
    shown = CliRunner().invoke(command, ["--help"])  # type: ignore[arg-type]
    assert shown.exit_code == 0
    assert f"Example: swerve {command.name} -n" in shown.output  # type: ignore[attr-defined]
    for option in ("--netns", "--config", "--no-color"):
        assert option in shown.output
    assert ("--json" in shown.output) == (command.name != "metrics"), "that prints nothing"  # type: ignore[attr-defined]
    for page in re.findall(r"docs/\w+\.md", " ".join(shown.output.split())):
        assert (ROOT / page).exists(), f"{page} is named and does not exist"


@pytest.mark.parametrize("arguments", [["--help"], ["delay", "-n", "nobody"], ["agent", "--help"]])
def test_starting_does_not_load_what_is_not_needed(arguments: list[str], tmp_path: Path) -> None:
    script = (
        "import sys; from pytools import cli; from steering.cli import root;"
        "cli.run(root); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "SWERVE_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert "click" in loaded
    assert not loaded & {"rich", "numpy", "pyroute2", "yaml", "bcc", "asyncio"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SwerveError("a", "b"), 1),
        (PolicyError("a", "b"), 3),
        (RefusedError("a", "b"), 4),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    error: BaseException, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    import click

    @click.command()
    def failing() -> None:
        raise error

    before = os.dup(1)
    try:
        assert cli.run(failing, []) == code
    finally:
        os.dup2(before, 1)
        os.close(before)
    said = capfd.readouterr().err.lstrip("\n")  # an interrupt ends the line of the echoed ^C
    assert said == ("swerve: a; b\n" if isinstance(error, SwerveError) else "")


def test_usage_errors_are_exit_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    by_name = {each.name: each for each in cli.commands}
    assert cli.run(by_name["delay"], ["--count", "0"]) == 2
    assert cli.run(by_name["watch"], ["-i", "1"]) == 2
    assert cli.run(by_name["watch"], ["--type", "nope", "-n", "nobody"]) == 2
    assert "no such signal type: nope" in capfd.readouterr().err
