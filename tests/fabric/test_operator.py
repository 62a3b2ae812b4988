"""An operator and a real controller: confirmation, the stop file, orders by hand, acts taken back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import dataclass

import pytest
import steering_kit as kit
import support
from steering_kit import EVEN, FIRST, MS, ROUTES, SECOND_HOP, STEERED, controlled, status, steered

from pytools import directories
from pytools.kernel import netns
from steering import elapsed
from steering.acting import acts_file
from steering.control import kept_orders
from steering.control.requests import SOCKET
from steering.guarding import confirming

CONFIRM_S = 7 * support.slow_factor()  # the first acts of three have to come within
OTHER = {FIRST: 1}


def steer(host, *words, check=True):
    """Run a `swerve steer` command about this host."""
    return support.swerve("steer", *words, "-n", host.netns, check=check)


def settled(agent, host=None):
    """Both paths are healthy, and the host's controller would carry out an order."""
    healthy = {"healthy"}
    support.wait_until(lambda: {s.state for s in agent.states.values()} == healthy, 20, "both paths are healthy")
    support.wait_until(lambda: len(agent.states) == 2, 20, "both paths are known")
    if host is not None:
        support.wait_until(lambda: status(host).get("guarded"), 20, "the guardian is ready")


# ---- confirmation ----


@dataclass
class Run:
    """A controller that has steered and is to be confirmed, its host, and until when it may be."""

    host: kit.Host
    agent: kit.FakeAgent
    controller: kit.Controller
    deadline: float


@pytest.fixture(scope="module")
def unconfirmed(make_lasting_namespace, tmp_path_factory):
    """Three of them, so that the tests wait for their deadlines at the same time: one hangs, one is confirmed."""
    runs = {}
    with contextlib.ExitStack() as stack:
        for what in ("confirmed", "hangs", "forgotten"):
            host = kit.two_rails(make_lasting_namespace(), make_lasting_namespace())
            agent = stack.enter_context(contextlib.closing(kit.FakeAgent(host.netns)))
            agent.queueing_ns[1] = 20 * MS
            lease = "lease: 60s" if what == "hangs" else f"lease: {kit.LEASE_S:g}s"
            text = kit.POLICY.replace(f"lease: {kit.LEASE_S:g}s", lease)
            policy = kit.policy_file(tmp_path_factory.mktemp(what), text)
            confirm = "--confirm", f"{CONFIRM_S:g}s"
            controller = stack.enter_context(controlled(host, policy, "--apply", *confirm))
            runs[what] = Run(host, agent, controller, time.monotonic() + CONFIRM_S)
        for what, run in runs.items():
            steered(run.host, run.agent)
            if what == "hangs":
                run.controller.kill(signal.SIGSTOP)
            elif what == "confirmed":  # a command takes its time to start
                assert "goes on" in confirming.confirm(run.controller.folder, "the test")
                run.deadline = time.monotonic() + CONFIRM_S
        yield runs


def test_what_is_confirmed_in_time_stays(unconfirmed):
    run = unconfirmed["confirmed"]
    host, agent, controller = run.host, run.agent, run.controller
    assert "already" in steer(host, "confirm").stdout
    assert status(host)["confirm"]["state"] == "confirmed"
    first = controller.guardian()
    support.wait_until(lambda: time.monotonic() > run.deadline, 30, "the time to confirm is over")
    assert host.weights() == STEERED and controller.process.poll() is None
    os.kill(first, signal.SIGKILL)  # the next guardian has the same deadline, and finds the confirmation
    support.wait_until(lambda: controller.guardian() not in (None, first), 10, "another guardian runs")
    seen = len(agent.state_log)
    support.wait_until(lambda: len(agent.state_log) > seen + 4, 20, "time passes")
    assert host.weights() == STEERED and controller.process.poll() is None
    assert controller.end() == 0
    entries = controller.journal()
    assert [e.kind for e in entries] == ["applied", "confirmed", "undone"]
    assert len({e.scope for e in entries}) == 1
    agent.close()


def test_a_run_that_hangs_unconfirmed_is_taken_back_and_cannot_be_confirmed(unconfirmed):
    run = unconfirmed["hangs"]
    assert run.controller.process.wait(2 * CONFIRM_S) == -signal.SIGKILL
    support.wait_until(lambda: run.host.weights() == EVEN, 20, "the weights are back")
    assert steer(run.host, "confirm", check=False).returncode == 4
    run.agent.close()


def test_what_nobody_confirms_is_taken_back(unconfirmed):
    run = unconfirmed["forgotten"]
    host, controller = run.host, run.controller
    assert controller.process.wait(2 * CONFIRM_S) == -signal.SIGKILL
    support.wait_until(controller.lock_is_free, 10, "the guardian has gone")
    assert host.weights() == EVEN
    late = steer(host, "confirm", check=False)
    assert late.returncode == 4 and late.stderr.count("\n") == 1
    controller.end()
    assert "was not confirmed in time" in controller.errors
    last = controller.journal()[-2:]
    assert [(entry.kind, entry.by) for entry in last] == [("expired", "guardian"), ("undone", "guardian")]
    assert "expired by guardian" in steer(host, "history").stdout
    run.agent.close()


def test_a_stop_before_the_confirmation_takes_back_even_what_was_to_be_kept(host, agent, policy):
    with controlled(host, policy, "--apply", "--keep", "--confirm", "100s") as controller:
        steered(host, agent)
        pending = status(host)["confirm"]
        assert pending["state"] == "open" and 0 < pending["left_s"] <= 100
        assert "TO BE CONFIRMED within" in steer(host, "status").stdout
        assert controller.end() == 0
    assert host.weights() == EVEN


def test_a_dry_run_needs_no_confirmation(host, policy):
    assert steer(host, "run", "--confirm", "9s", "--policy", str(policy), check=False).returncode == 2


# ---- the stop file ----


@pytest.mark.parametrize("where", ["instance", "host"])
def test_while_the_stop_file_exists_nothing_is_changed(host, agent, policy, where):
    folder = directories.state_dir(host.netns)
    option = ["--host"] if where == "host" else []
    with controlled(host, policy, "--apply") as controller:
        settled(agent, host)
        steer(host, "freeze", "--why", "switch upgrade", *option)
        place = folder.parent / "freeze" if option else folder / "freeze"
        assert place.read_text() == "switch upgrade\n"
        support.wait_until(lambda: "frozen" in agent.states[kit.path(1)].reason, 10, "the paths are called frozen")
        agent.queueing_ns[1] = 20 * MS
        support.wait_until(lambda: agent.states[kit.path(1)].state == "suspect", 10, "rail 1 is suspect")
        lease_over = time.monotonic() + 1.5 * kit.LEASE_S
        assert status(host)["frozen"] == "switch upgrade"
        assert "FROZEN" in steer(host, "status").stdout
        refused = steer(host, "undo", "1", check=False)
        assert refused.returncode == 4 and "frozen" in refused.stderr
        waits = steer(host, "drain", "rail2", check=False)
        assert waits.returncode == 1 and "frozen" in waits.stderr and "the order stands" in waits.stderr
        support.wait_until(lambda: time.monotonic() > lease_over, 60, "the lease would be over")
        assert host.weights() == EVEN and agent.acts_of("applied") == []
        steer(host, "undrain", "rail2")
        steer(host, "thaw", *option)
        support.wait_until(lambda: host.weights() == STEERED, 10, "steering goes on")
        assert controller.end() == 0
    said = [(act.what, act.outcome) for _, act in acts_file.read(folder) if act.what == "freeze"]
    assert said == [("freeze", "alert"), ("freeze", "alert_over")]


def test_what_is_in_force_stays_while_frozen_and_ends_with_the_controller(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        (directories.state_dir(host.netns) / "freeze").touch()
        agent.silent = True
        support.wait_until(lambda: "hold" in agent.states[kit.path(1)].reason, 10, "the measurements are stale")
        baseline_over = time.monotonic() + 4
        support.wait_until(lambda: time.monotonic() > baseline_over, 60, "the original weights would be back")
        assert host.weights() == STEERED
        controller.kill()
        support.wait_until(lambda: host.weights() == EVEN, 20, "its guardian undoes it all the same")


# ---- orders ----


def test_a_drain_for_maintenance_and_its_end(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        settled(agent, host)
        done = steer(host, "drain", "rail1", "--why", "new optics", "--for", "1h").stdout
        assert "10.1.1.1 dev rail1 weight 0" in done
        assert host.weights() == STEERED
        act = support.wait_until(lambda: agent.acts_of("applied"), 10, "the act is told")[0]
        assert act.under == "operator" and "new optics" in act.because
        order = status(host)["orders"][0]
        assert (order["interface"], order["why"]) == ("rail1", "new optics")
        assert order["until_unix_ns"] - time.time_ns() > 3500 * 10**9
        file = directories.state_dir(host.netns) / kept_orders.FILE
        assert file.stat().st_mode & 0o777 == 0o600
        assert "rail1 weight 1" in steer(host, "undrain", "rail1").stdout
        assert host.weights() == EVEN
        back = support.wait_until(lambda: agent.acts_of("applied")[1:], 10, "the way back is told")[0]
        assert back.under == "operator" and "taken back" in back.because
        assert status(host)["orders"] == []
        nothing = steer(host, "undrain", "rail1", check=False)
        assert nothing.returncode == 2
        assert controller.end() == 0


def test_an_order_outlives_the_controller(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        settled(agent, host)
        steer(host, "drain", "10.2.1.1", "--to", "10.9.0.0/24", "--for", "1h")
        assert host.weights() == OTHER
        controller.kill()
        support.wait_until(lambda: host.weights() == EVEN, 20, "the guardian undid it")
        support.wait_until(controller.lock_is_free, 10, "the guardian has gone")
    with controlled(host, policy, "--apply") as controller:
        support.wait_until(lambda: host.weights() == OTHER, 20, "the order still holds")
        controller.end()
    forgotten = steer(host, "undrain", "10.2.1.1", "--to", "10.9.0.0/24", check=False)
    assert forgotten.returncode == 1, "which targets carry a prefix only a controller knows"
    assert "forgotten: drain" in steer(host, "undrain", "10.2.1.1").stdout
    assert kept_orders.load(directories.state_dir(host.netns), elapsed.moment()).orders == ()


def test_a_drain_that_would_leave_nothing_is_refused(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        settled(agent, host)
        steer(host, "drain", "rail1")
        for words, why in ((("rail2",), "without a nexthop"), (("10.2.1.1", "--to", "10.9.0.2"), "without a nexthop")):
            refused = steer(host, "drain", *words, check=False)
            assert refused.returncode == 4 and why in refused.stderr and refused.stderr.count("\n") == 1
        assert host.weights() == STEERED
        steer(host, "undrain", "rail1")
        unknown = steer(host, "drain", "rail7", check=False)
        assert unknown.returncode == 2 and "10.1.1.1 dev rail1" in unknown.stderr
        steered(host, agent)  # by the policy
        refused = steer(host, "drain", "rail2", check=False)
        assert refused.returncode == 4 and "are drained" in refused.stderr
        assert host.weights() == STEERED and status(host)["orders"] == []
        controller.end()


def test_a_drain_toward_paths_that_are_not_measured_is_refused(host, agent, policy):
    agent.queueing_ns[2] = None
    with controlled(host, policy, "--apply"):
        support.wait_until(lambda: len(agent.states) == 2, 20, "the controller speaks of both paths")
        refused = steer(host, "drain", "rail1", check=False)
        assert refused.returncode == 4 and "not measured" in refused.stderr
        assert host.weights() == EVEN


def test_orders_that_others_could_have_written_are_not_obeyed(host, policy):
    file = directories.state_dir(host.netns) / kept_orders.FILE
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text('{"version":1,"orders":[]}')
    file.chmod(0o666)
    done = steer(host, "run", "--apply", "--policy", str(policy), check=False)
    assert done.returncode == 4 and "writable by everybody" in done.stderr


def test_orders_need_a_controller(host):
    for words in (["drain", "rail1"], ["hold"], ["unpin", "10.9.0.1:1-10.9.0.2:2"]):
        done = steer(host, *words, check=False)
        assert done.returncode == 1 and "no controller runs" in done.stderr


# ---- taking acts back ----


def test_the_last_acts_are_taken_back_one_by_one_and_held(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        agent.queueing_ns[1] = 0
        support.wait_until(lambda: host.weights() == EVEN, 20, "rail 1 is back at its whole weight")
        said = steer(host, "undo", "1").stdout
        assert "weight" in said and host.weights() != EVEN
        halved = host.weights()
        assert halved[FIRST] * 2 == halved[SECOND_HOP]
        assert [order["kind"] for order in status(host)["orders"]] == ["hold"]
        steer(host, "undo", "3")
        assert host.weights() == EVEN, "as it was before the first act"
        assert steer(host, "undo", "1").stdout == "nothing to undo\n"
        agent.queueing_ns[1] = 20 * MS
        support.wait_until(lambda: "holds it" in agent.states[kit.path(1)].reason, 10, "the policy may not do it again")
        assert host.weights() == EVEN
        steer(host, "unhold", ROUTES)
        support.wait_until(lambda: host.weights() == STEERED, 10, "now it may")
        assert controller.end() == 0
    assert {e.under for e in controller.journal() if e.act_id.startswith("undo:")} == {"operator"}


def test_single_acts_are_taken_back_by_a_controller_only(host, agent, policy):
    with controlled(host, policy, "--apply", "--keep") as controller:
        steered(host, agent)
        assert controller.end() == 0
    refused = steer(host, "undo", "1", check=False)
    assert refused.returncode == 1 and "no controller runs" in refused.stderr
    assert host.weights() == STEERED
    assert "original weights are back" in steer(host, "undo").stdout
    assert host.weights() == EVEN and steer(host, "undo").stdout == "nothing to undo\n"


# ---- the socket ----


def test_no_client_holds_the_controller_up(host, agent, policy):
    """Rubbish is answered, silence is put out, and steering goes on meanwhile."""
    path = str(directories.state_dir(host.netns) / SOCKET)
    with controlled(host, policy, "--apply") as controller:
        settled(agent, host)
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(40)]
        for each in silent:
            each.connect(path)  # without a timeout: it waits while the queue is full
        for rubbish in (b"\0\xff", b"{}", b"[" * 60_000, b"x" * 100_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
                one.connect(path)
                one.settimeout(20)
                one.send(rubbish)
                assert json.loads(one.recv(1 << 20))["code"] == 2
        steered(host, agent)
        facts = status(host)
        assert facts["answers"] and facts["control"]["malformed"] == 4 and facts["control"]["put_out"] >= 24
        assert facts["guardian_pid"] == controller.guardian()
        assert facts["wanted"] == {}, "it is so already"
        silent[0].settimeout(20)
        assert silent[0].recv(1) == b"", "the first to come was put out"
        for each in silent:
            each.close()
        assert controller.end() == 0
    assert not os.path.exists(path)


def test_status_says_when_the_policy_file_has_changed(host, agent, policy):
    with controlled(host, policy):
        settled(agent)
        assert status(host)["policy_changed"] is False
        policy.write_text(kit.POLICY + "# another one\n")
        assert status(host)["policy_changed"] is True
        assert "restart to use it" in steer(host, "status").stdout


def test_the_history_can_be_narrowed(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        controller.end()
    kinds = [
        json.loads(line)["kind"]
        for line in steer(host, "history", "-j", "--target", "10.9.0.2").stdout.split("\n")[:-1]
    ]
    assert kinds == ["applied", "undone"]
    assert steer(host, "history", "--target", "elsewhere").stdout == ""
    assert steer(host, "history", "--since", "2099-01-01").stdout == ""
    assert len(steer(host, "history", "--since", "1h", "-c", "2").stdout.splitlines()) == 2


# ---- pins by hand ----


def _sent(host, rail):
    """Packets that left by a rail, as the interface counts."""
    return json.loads(host.ip("-j", "-s", "link", "show", "dev", f"rail{rail}"))[0]["stats64"]["tx"]["packets"]


def _send(host, count=50):
    """UDP packets of one flow; the rail that routing gives it."""
    before = {rail: _sent(host, rail) for rail in (1, 2)}
    with netns.inside(host.netns), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("10.1.1.2", 40_000))
        for _ in range(count):
            sock.sendto(b"x", ("10.9.0.2", 5201))
    return max((1, 2), key=lambda rail: _sent(host, rail) - before[rail])


def test_a_flow_is_pinned_by_hand_and_let_go(host, agent, policy):
    support.require("bcc")
    flow = "udp:10.1.1.2:40000-10.9.0.2:5201"
    with controlled(host, policy, "--apply") as controller:
        settled(agent, host)
        routed = _send(host)
        other = 3 - routed
        steer(host, "pin", flow, "--via", f"rail{other}", "--for", "10m", "--why", "by hand")
        support.wait_until(lambda: _send(host) == other, 10, "the flow leaves by the other rail")
        pins = status(host)["pins"]
        assert [(pin["via"], pin["by_hand"]) for pin in pins] == [(f"10.{other}.1.1 dev rail{other}", True)]
        assert f"pinned: {flow} to 10.{other}.1.1 dev rail{other}" in steer(host, "status").stdout
        told = support.wait_until(lambda: [act for act in agent.acts if act.actuator == "pin"], 10, "the act is told")
        assert [(act.under, act.outcome) for act in told] == [("operator", "applied")]
        steer(host, "unpin", flow)
        support.wait_until(lambda: _send(host) == routed, 10, "the flow goes as it is routed")
        assert steer(host, "unpin", flow, check=False).returncode == 2
        unknown = steer(host, "pin", flow, "--via", "rail9", "--for", "1m", check=False)
        assert unknown.returncode == 2 and "rail1" in unknown.stderr
        assert controller.end() == 0
    said = [json.loads(line) for line in steer(host, "history", "-j").stdout.splitlines()]
    assert [(act["actuator"], act["outcome"]) for act in said] == [("pin", "applied"), ("pin", "undone")]


def test_a_dry_run_pins_nothing(host, agent, policy):
    with controlled(host, policy):
        settled(agent)
        refused = steer(host, "pin", "10.1.1.2:4000-10.9.0.2:5201", "--via", "rail1", "--for", "1m", check=False)
        assert refused.returncode == 4 and "dry run" in refused.stderr
