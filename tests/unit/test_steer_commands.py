"""`swerve steer` without a controller: orders and the lock on disk, and what the operator reads when a file fails."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import samples
import support
from serving import Served
from steering_kit import ORIGINAL, SECOND, TARGET, AtOnce, group, policy_file

from pytools import cli, directories
from pytools.errors import RefusedError, SwerveError
from pytools.kernel import netns, privileges
from pytools.signals import encode
from steering import controller, elapsed
from steering.acting import acts_file, journal, lock
from steering.acting.lock import Lock
from steering.cli import root
from steering.commands import status, undo
from steering.control import client, kept_orders, requests, stop_file
from steering.deciding.overrides import Override, Overrides
from steering.guarding import confirming


class Kernel:
    """A namespace where a dead controller left a rule and two nexthops."""

    def __init__(self):
        self.rules, self.rest, self.asked = ["IPv4 rule 32765 to table 20000"], ["2 nexthops"], []

    def switch_off(self, _):
        self.asked.append("off")
        left, self.rules = self.rules, []
        return left

    def sweep(self, _):
        left, self.rest = self.rest, []
        return left


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(undo, "Netlink", contextlib.nullcontext)
    found = directories.state_dir(None)
    found.mkdir()
    return found


@pytest.fixture
def kernel(monkeypatch):
    found = Kernel()
    monkeypatch.setattr(undo, "switch_off", found.switch_off)
    monkeypatch.setattr(undo, "sweep", found.sweep)
    monkeypatch.setattr(undo.attach, "clean", lambda role: [f"filter of {role.name}"])
    return found


@pytest.fixture
def say(capsys):
    """Run a command: its exit code, and what it said on either stream."""

    def run(*words):
        code = cli.run(root, ["steer", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def full(*_, **__):
    raise OSError(28, "No space left on device")


# ---- undo ----


def test_where_nobody_ever_steered_there_is_nothing_to_undo(folder, kernel, say):
    assert say("undo") == (0, "nothing to undo\n")
    assert kernel.asked == [] and list(folder.iterdir()) == []


@pytest.mark.parametrize("words", [["off"], ["undo", "--stop"]])
def test_the_rules_go_before_the_controller_is_asked_to_end(folder, kernel, say, monkeypatch, words):
    monkeypatch.setattr(undo, "_stop_controller", lambda _: bool(kernel.asked.append("stop")) or True)
    (folder / journal.LOCK_FILE).touch()
    said = "removed IPv4 rule 32765 to table 20000\nremoved 2 nexthops\nremoved filter of swerve-steer\n"
    assert say(*words) == (0, said)
    assert kernel.asked == ["off", "stop", "off"]


def test_what_was_in_force_is_told_and_noted(folder, kernel, say):
    known = group({1: [], 2: []})
    with journal.Journal(folder / journal.FILE) as log:
        log.write(journal.entry_now("applied", "a", known, known.current, ((12, 1),), "", "", netns.scope()))
    (folder / journal.LOCK_FILE).touch()
    code, said = say("undo")
    assert code == 0 and said.startswith("nexthop group 102: original weights are back\n")
    assert "undone by command" in say("history")[1].splitlines()[-1]


def test_a_full_disk_is_told_in_one_line_and_the_rules_are_gone_all_the_same(folder, kernel, say, monkeypatch):
    (folder / journal.LOCK_FILE).touch()
    monkeypatch.setattr(undo.rollback, "note", full)
    code, said = say("undo")
    assert code == 1 and len(said.splitlines()) == 1
    assert support.mentions(said, "swerve", str(folder), "No space left on device")
    assert kernel.rules == []


def test_single_acts_are_taken_back_by_a_running_controller_only(folder, kernel, say):
    code, said = say("undo", "1")
    assert code == 1 and "no controller runs" in said


# ---- run ----


@pytest.mark.parametrize(
    ("process", "words", "warned"), [(1, ["--apply"], True), (1, [], False), (7, ["--apply"], False)]
)
def test_process_1_of_a_container_is_told_that_its_guardian_cannot_kill_it(
    say, monkeypatch, tmp_path, process, words, warned
):
    monkeypatch.setattr(os, "getpid", lambda: process)
    monkeypatch.setattr(privileges, "raise_priority", str)
    monkeypatch.setattr(controller, "Controller", lambda *_: SimpleNamespace(run=lambda: 0))
    code, said = say("run", "--policy", str(policy_file(tmp_path)), *words)
    assert code == 0 and ("cannot be killed by its guardian" in said) is warned


# ---- orders on disk ----


def test_a_hold_of_a_group_is_forgotten_by_its_number(folder, say):
    kept_orders.save(folder, Overrides((Override("hold", target=TARGET),)))
    assert say("unhold", "102") == (0, f"forgotten: hold {TARGET}\n")
    assert kept_orders.load(folder, elapsed.moment()).orders == ()


def test_nothing_ends_no_drain(folder, say):
    kept_orders.save(folder, Overrides((Override("drain", "rail1"),)))
    assert say("undrain", "")[0] == 2
    assert len(kept_orders.load(folder, elapsed.moment()).orders) == 1


def test_orders_that_cannot_be_written_are_told_in_one_line(folder, say, monkeypatch):
    kept_orders.save(folder, Overrides((Override("drain", "rail1"),)))
    monkeypatch.setattr(kept_orders, "save", full)
    code, said = say("undrain", "rail1")
    assert code == 1 and len(said.splitlines()) == 1
    assert support.mentions(said, "swerve", str(folder), "No space left on device")


def test_who_only_looks_at_the_lock_is_waited_for(folder, say, monkeypatch):
    kept_orders.save(folder, Overrides((Override("drain", "rail1"),)))
    looking = os.open(folder / journal.LOCK_FILE, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(lock.select, "select", lambda *_: os.close(looking))  # while we wait
    assert say("undrain", "rail1")[0] == 0


@pytest.mark.parametrize(("alive", "said"), [(True, "already runs"), (False, "being undone")])
def test_who_holds_the_lock_is_not_called_a_controller_when_that_is_dead(tmp_path, alive, said):
    path = tmp_path / journal.LOCK_FILE
    with Lock(path) as held:
        if not alive:
            held.say({"pid": 1 << 30})  # no process has such a number
        with pytest.raises(SwerveError, match=said) as refused:
            Lock(path)
        assert refused.type is (RefusedError if alive else SwerveError), "a service tries again what is no refusal"


# ---- the stop file ----


def test_a_full_disk_is_no_lack_of_privileges(folder, say, monkeypatch):
    monkeypatch.setattr(stop_file, "freeze", full)
    code, said = say("freeze")
    assert code == 1 and "as root" not in said and said.count("\n") == 1


def test_a_reason_that_is_no_text_is_no_traceback(folder, say):
    assert say("freeze", "--why", "\udcff")[0] == 0
    assert say("drain", "rail1", "--why", "\udcff")[0] == 2


# ---- history ----


def remember(folder, *entries, scope="", begin=0):
    """Journal these (kind, act), a second apart."""
    with journal.Journal(folder / journal.FILE) as log:
        for second, (kind, act_id) in enumerate(entries):
            facts = (group({1: [], 2: []}), ORIGINAL, ((12, 1),), act_id, "rule", scope or netns.scope())
            log.write(replace(journal.entry_now(kind, act_id, *facts), unix_ns=(begin + second) * SECOND))


def shown(said):
    """Kind and act of each line for people."""
    return [(line.split()[1], line.split(" because ")[1].split()[0]) for line in said.splitlines()]


ENTRIES = (("applied", "a"), ("failed", "b"), ("applied", "c"), ("undone", "c"))


def test_an_act_is_one_line_with_its_outcome(folder, say):
    remember(folder, *ENTRIES)
    code, said = say("history")
    assert (code, shown(said)) == (0, list(ENTRIES))
    assert shown(say("history", "-c", "2")[1]) == [("applied", "c"), ("undone", "c")], "lines are counted"
    assert shown(say("history", "--since", "1970-01-01T00:00:01Z")[1])[0] == ("failed", "b")


@pytest.mark.parametrize(
    ("column", "order"), [("time", (3, 2, 1, 0)), ("outcome", (0, 2, 1, 3)), ("target", (0, 1, 2, 3))]
)
def test_history_is_sorted_by_a_column_and_has_no_parts_then(folder, say, column, order):
    remember(folder, ENTRIES[0], scope=_other("boot", "cookie:1"))
    remember(folder, *ENTRIES[1:], begin=10)
    assert shown(say("history", "--sort", column)[1]) == [ENTRIES[number] for number in order]
    told = [json.loads(line)["kind"] for line in say("history", "-j", "--sort", column, "-c", "3")[1].splitlines()]
    assert told == [ENTRIES[number][0] for number in order if number], "the last three, in this order"


def test_a_program_is_told_every_entry(folder, say):
    remember(folder, *ENTRIES)
    told = [json.loads(line) for line in say("history", "-j")[1].splitlines()]
    assert [(each["kind"], each["act_id"]) for each in told] == list(ENTRIES)


def _other(boot="", namespace=""):
    here, _, cookie = netns.scope().partition("/")
    return f"{boot or here}/{namespace or cookie}"


def test_earlier_namespaces_of_a_name_are_left_out_unless_asked_for(folder, say):
    remember(folder, ("applied", "theirs"), ("undone", "theirs"), scope=_other(namespace="cookie:1"))
    remember(folder, ("applied", "a"), begin=10)
    code, said = say("history")
    *lines, note = said.splitlines()
    assert code == 0 and shown("\n".join(lines)) == [("applied", "a")]
    assert support.mentions(note, "swerve steer", "2 entries", "earlier network namespaces", "--all")
    lines = say("history", "--all")[1].splitlines()
    assert support.mentions(lines[0], "earlier network namespace") and support.mentions(lines[3], "this boot")
    assert shown("\n".join(lines[1:3] + lines[4:])) == [("applied", "theirs"), ("undone", "theirs"), ("applied", "a")]
    told = [json.loads(line) for line in say("history", "-j", "--all")[1].splitlines()]
    assert [each["scope"] == netns.scope() for each in told] == [False, False, True]


def test_earlier_boots_are_told_apart(folder, say):
    remember(folder, ("applied", "old"), scope=_other("boot", "cookie:1"))
    earlier, now = say("history")[1].splitlines()[::2]
    assert support.mentions(earlier, "earlier boot") and support.mentions(now, "nothing", "this boot")
    remember(folder, ("applied", "new"), begin=10)
    lines = say("history")[1].splitlines()
    earlier, now = lines[::2]
    assert support.mentions(earlier, "earlier boot") and support.mentions(now, "this boot") and "nothing" not in now
    assert shown("\n".join(lines[1::2])) == [("applied", "old"), ("applied", "new")]


def test_a_confirmation_is_of_the_boot_and_namespace_of_the_run(folder, say):
    remember(folder, ("applied", "old"), scope=_other("boot", "cookie:1"))
    here = _other(namespace="cookie:2")
    deadline = confirming.deadline_in(60 * SECOND)
    with Lock(folder / journal.LOCK_FILE) as held:
        held.say(confirming.facts(deadline) | {"scope": here})
        assert say("confirm")[0] == 0
    assert journal.read(folder / journal.FILE).entries[-1].scope == here
    told = [json.loads(line) for line in say("history", "-j", "--all")[1].splitlines()]
    assert [(each["kind"], each["scope"]) for each in told[1:]] == [("confirmed", here)]
    assert "-- an earlier network namespace of this name --" in say("history", "--all")[1].splitlines()


def test_acts_have_their_boot_and_namespace(folder, say, monkeypatch):
    theirs = _other(namespace="cookie:1")
    monkeypatch.setattr(netns, "scope", lambda: theirs)
    with contextlib.closing(acts_file.ActsFile(folder, AtOnce())) as file:
        file.write(samples.act(5, actuator="pin", act_id="theirs"))
    monkeypatch.undo()
    monkeypatch.setenv("SWERVE_STATE_DIR", str(folder.parent))
    with contextlib.closing(acts_file.ActsFile(folder, AtOnce())) as file:
        file.write(samples.act(6, actuator="pin", act_id="ours"))
    (line, note) = say("history", "-j")[1].splitlines()
    assert (json.loads(line)["act_id"], json.loads(line)["scope"]) == ("ours", netns.scope())
    assert note.startswith("swerve steer: 1 entries of earlier")
    with (folder / acts_file.FILE).open("ab") as file:  # of an older version: it was where the last one was
        file.write(encode(samples.act(7, actuator="pin", act_id="older")) + b"\n")
    assert [json.loads(line)["act_id"] for line in say("history", "-j")[1].splitlines()[:-1]] == ["ours", "older"]


def test_a_namespace_that_is_gone_leaves_its_history(folder, say, monkeypatch):
    gone = directories.state_dir("swerve-gone")
    gone.mkdir()
    remember(gone, ("applied", "a"), scope=_other(namespace="cookie:1"))
    code, said = say("history", "-n", "swerve-gone")
    assert code == 0 and support.mentions(said.splitlines()[0], "earlier network namespace")


def test_programs_get_names_beside_ids(folder, say):
    remember(folder, ("applied", "a"))
    told = json.loads(say("history", "-j")[1])
    rails = "10.1.1.1 dev rail1", "10.2.1.1 dev rail2"
    assert told["named"]["before"] == dict.fromkeys(rails, 1) and told["named"]["after"] == {rails[0]: 0, rails[1]: 1}


# ---- status ----


def test_a_controller_with_too_much_to_say_has_its_orders_told_from_disk(folder, monkeypatch):
    kept_orders.save(folder, Overrides((Override("drain", "rail1"),)))
    monkeypatch.setattr(client, "ask", lambda *_: requests.Reply())
    facts = status.controller_of(folder)
    assert facts["answers"] and [order["interface"] for order in facts["orders"]] == ["rail1"]


@pytest.mark.parametrize("as_told", [kept_orders.as_json, lambda order, _: msgspec.to_builtins(order)])
def test_the_end_of_an_order_is_shown_by_the_wall_clock_of_now(monkeypatch, as_told):
    """Also of a controller of an older version, which says less."""
    order, now = Override("hold", why="optics").lasting(60 * SECOND, elapsed.moment()), elapsed.moment()
    monkeypatch.setattr(status.time, "time_ns", lambda: 129_600 * SECOND)  # it was stepped meanwhile
    facts = {"running": False, "instance": "host", "frozen": "", "in_force": [], "paths": [], "torn_lines": 0}
    [line] = [line for line in status.lines_of(facts | {"orders": [as_told(order, now)]}) if "ordered by" in line]
    assert support.mentions(line, "hold", "everything", "optics") and "until 1970-01-02T" in line


def test_what_was_left_out_is_told():
    facts = {
        **{"running": True, "policy_changed": False, "answers": True, "confirm": None, "frozen": "", "orders": []},
        **{"in_force": [], "paths": [], "torn_lines": 0},
    }
    lines = list(status.lines_of(facts | {"signals_refused": 3}))
    assert any(line.startswith("3 signals were refused") for line in lines)
    missed = {"signals_missed": 7, "signals_missed_urgent": 2}
    assert any(support.mentions(line, "7 signals", "missed", "2", "urgent") for line in status.lines_of(facts | missed))
    assert "nothing of ours is in force" in lines


@pytest.mark.parametrize(("apply", "shown"), [(False, 1), (True, 0)])
def test_a_dry_run_says_what_is_wanted(apply, shown):
    facts = {"running": True, "answers": True, "apply": apply, "policy_changed": False, "confirm": None, "frozen": ""}
    facts |= {"orders": [], "in_force": [], "paths": [], "torn_lines": 0}
    facts["wanted"] = {"nexthop_group:102": {11: 0, 12: 1}}
    lines = [line for line in status.lines_of(facts) if "wanted" in line]
    assert len(lines) == shown
    assert all(support.mentions(line, "nexthop group 102", "11 weight 0", "12 weight 1", "dry run") for line in lines)


@pytest.mark.parametrize(("guarded", "said"), [(True, "process 7\n"), (False, "process 7, which is not ready: until")])
def test_a_guardian_that_is_not_ready_is_told_as_such(guarded, said):
    facts = {"running": True, "answers": True, "apply": True, "policy_changed": False, "confirm": None}
    facts |= {"guardian_pid": 7, "guarded": guarded}
    assert f"guardian {said}" in "".join(f"{line}\n" for line in status.about_the_controller(facts))


@pytest.mark.deadline(60)
def test_once_every_path_was_heard_of_nothing_more_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(status, "_STATES_S", 1e6)
    served = Served(directories.agent_socket(None))
    heard = []
    asking = threading.Thread(target=lambda: heard.extend(status.path_states(None, 2)), daemon=True)
    asking.start()
    served.until(lambda: served.bus.wanted("path_state"), "it listens")
    for rail in (1, 1, 2):
        served.bus.publish(samples.path_state(rail))
    served.until(lambda: not asking.is_alive(), "it has heard enough")
    served.close()
    assert [each["path"]["interface"] for each in heard] == ["rail1", "rail2"]


def test_where_no_path_is_known_none_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(status, "_STATES_S", 1e6)
    with contextlib.closing(Served(directories.agent_socket(None))):
        assert status.path_states(None, 0) == []


# ---- starting ----


@pytest.mark.parametrize("words", [["--help"], ["confirm"], ["freeze"], ["drain", "rail1"], ["history"]])
def test_what_an_operator_types_in_a_hurry_starts_without_the_policy_language_and_netlink(tmp_path, words):
    """Those are most of half a second, in which a run may be taken back that is just being confirmed."""
    script = (
        "import sys; from pytools import cli; from steering.cli import root;"
        "cli.run(root); print(*sys.modules, file=sys.stderr)"
    )
    folders = {"SWERVE_STATE_DIR": str(tmp_path), "SWERVE_RUNTIME_DIR": str(tmp_path)}
    done = support.run([sys.executable, "-c", script, "steer", *words], env=folders)
    loaded = set(done.stderr.split())
    assert "steering.commands.steer" in loaded
    assert not loaded & {"pydantic", "pydantic_core", "yaml", "pyroute2", "numpy", "rich", "asyncio"}
