"""What agents find, and what an operator's order does, on every kind of route, as hops go and processes are killed.

Under an order both families carry datagrams and connections all the time, and the owner's rules, routes and nexthops
are compared byte by byte. A host is made once for its kind; tests leave it as it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path as File

import pytest
import route_kinds
import steering_kit as kit
import support
import yaml
from live_traffic import Traffic
from route_kinds import FAMILIES, PEER, RAILS, SOURCE
from routing_daemons import NetworkManager, Writes

from pytools import directories
from pytools.ipc.bus import Client
from pytools.kernel import features
from pytools.kernel.bpf import attach
from pytools.kernel.netns import inside
from pytools.signals import Path, PathLiveness, PathState
from steering.control import client, kept_orders, requests
from steering.deciding.overrides import NONE

pytestmark = pytest.mark.beside

KINDS = {
    "plain": route_kinds.Plain,
    "multipath": route_kinds.Multipath,
    "nexthop group": route_kinds.NexthopGroup,
    "metric": route_kinds.Metric,
    "source table": route_kinds.SourceTable,
    "FRR BGP": route_kinds.Frr,
    "FRR BGP classic": route_kinds.FrrClassic,
    "bird BGP": route_kinds.Bird,
    "networkd": route_kinds.Networkd,
    "dhclient and RA": route_kinds.Dhclient,
}
ELSEWHERE = {  # in tests/prove
    "VRF": route_kinds.Vrf,
    "NetworkManager": route_kinds.NetworkManager,
    "NetworkManager leases": route_kinds.NetworkManagerLeased,
    "networkd leases": route_kinds.NetworkdLeased,
    "Cilium": route_kinds.Cilium,
}
if chosen := os.environ.get("SWERVE_TEST_KIND"):
    KINDS = {name: ELSEWHERE[name] for name in chosen.split(",")}
    NetworkManager.packages = File(os.environ.get("SWERVE_TEST_PACKAGES", "/"))
DROP = ((0xB7, 0, 0, 0, 2), (0x95, 0, 0, 0, 0))  # return TC_ACT_SHOT
EVERY_S = 0.02 * min(10, support.slow_factor())
IN_FLIGHT = 400  # datagrams: no more are under way, or wait for a link that has gone, until all have heard of it


class Steered:
    """A host of one kind, traffic on it, and the controller that steers it."""

    def __init__(self, host, traffic, agent, policy):
        self.host, self.traffic, self.agent, self.policy = host, traffic, agent, policy
        self.controller = None
        self.before = self.host.others()

    def start(self):
        """Have a controller that knows all paths and would act."""
        if self.controller is None or self.controller.process.poll() is not None:
            self.agent.states.clear()
            self.controller = kit.Controller(kit.Host(self.host.netns), self.policy, "--apply")
        paths = len(FAMILIES) * len(RAILS)
        support.wait_until(lambda: len(self.known()) == paths and self.facts()["guarded"], 30, "it is ready")

    def known(self):
        """The paths over rails that the controller speaks of; an owner may have more."""
        return [path for path in self.agent.states if path.interface.startswith("rail")]

    def drain(self):
        """Rail 1 is left."""
        self.start()
        self.before = self.host.others()
        assert self.ask(requests.Drain("rail1")).code == 0
        self.comes_to(self.host.drained)
        self.traffic.unharmed()

    def undrain(self):
        """It carries again what the owner gives it, and nothing of ours is in force."""
        assert self.ask(requests.Undrain("rail1")).code == 0
        self.is_undone()

    def ask(self, request):
        return client.ask(directories.state_dir(self.host.netns), request)

    def facts(self):
        with contextlib.suppress(Exception):
            return self.ask(requests.Status()).facts
        return {"guarded": False}

    def comes_to(self, rails):
        support.wait_until(lambda: self.host.uses(rails), 20, f"packets leave by {set(rails)}")

    def is_undone(self):
        support.wait_until(lambda: self.host.ours("rule") == 0, 20, "no rule of ours is left")
        self.comes_to(self.host.first)

    def is_gone(self):
        """Nothing of ours is left in the kernel, and all of theirs is as it was."""
        support.wait_until(self.controller.lock_is_free, 30, "controller and guardian have gone")
        self.is_undone()
        assert self.host.ours() == 0 and self.host.others() == self.before

    def theirs_are_back(self):
        """The owner has made all its addresses and routes again; it makes them one by one."""
        support.wait_until(lambda: sorted(self.host.others()) == sorted(self.before), 20, "all of theirs is back")

    def kill_both(self):
        """The guardian first stands still, so that it undoes nothing."""
        guardian = self.controller.guardian()
        os.kill(guardian, signal.SIGSTOP)
        self.controller.kill()
        os.kill(guardian, signal.SIGKILL)
        self.controller.process.communicate(timeout=30)
        support.wait_until(self.controller.lock_is_free, 10, "both are dead")

    def forget_orders(self):
        """No controller runs, and the next one finds no order."""
        kept_orders.save(directories.state_dir(self.host.netns), NONE)

    def end(self):
        if self.controller is not None and self.controller.process.poll() is None:
            self.controller.end()


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def steered(kind, make_lasting_namespace, tmp_path_factory):
    with contextlib.ExitStack() as stack:
        host = kind(make_lasting_namespace(), make_lasting_namespace())
        stack.enter_context(host.owned())
        hops = {family: host.gateways(family) for family in FAMILIES}
        hops = {family: {rail: route_kinds.gateway(family, rail) for rail in RAILS} | hops[family] for family in hops}

        def paths(rail):
            return [Path("h1", f"h2v{family}", PEER[family], hops[family][rail], f"rail{rail}") for family in FAMILIES]

        traffic = stack.enter_context(contextlib.closing(Traffic(host.netns, host.peer, SOURCE, PEER, host.device)))
        agent = stack.enter_context(contextlib.closing(kit.FakeAgent(host.netns, RAILS, EVERY_S, paths)))
        text = yaml.safe_load(kit.POLICY)
        text["manage"] = managed(host)
        text["rules"][0]["return"] = {"dwell": "200ms", "retry_after": "200ms", "steps": [1.0], "step": "200ms"}
        made = Steered(host, traffic, agent, kit.policy_file(tmp_path_factory.mktemp("kind"), yaml.safe_dump(text)))
        stack.callback(made.end)
        yield made


def test_an_order_steers_and_its_end_undoes(steered):
    steered.drain()
    seen = steered.agent.published
    support.wait_until(lambda: steered.agent.published > seen + 450, 20, "the owner has compared the kernel's routes")
    assert steered.host.uses(steered.host.drained) and steered.host.others() == steered.before
    steered.undrain()
    assert steered.host.others() == steered.before
    steered.traffic.unharmed()


WITH_STATIC = KINDS | ({} if chosen else {"FRR static": route_kinds.FrrStatic})
SPREAD = {name: kind for name, kind in WITH_STATIC.items() if kind.first == frozenset(RAILS)}


SILENCE = """
- name: leave-silent-rail
  when: {signal: silence, missed: 3}
  then: {drain: {}}
  return: {dwell: 200ms, retry_after: 200ms, steps: [1.0], step: 200ms}
"""


@pytest.mark.parametrize("kind", SPREAD.values(), ids=SPREAD)
def test_every_hop_is_probed_and_a_silent_one_is_left_until_it_answers(kind, make_namespace, tmp_path):
    """Agents and a controller as shipped; what comes in over rail 1 is dropped, and its carrier stays."""
    host, live, states = kind(make_namespace(), make_namespace()), {}, {}
    sources = [*SOURCE.values(), *(route_kinds.gateway(f, rail, 2) for f in FAMILIES for rail in RAILS)]
    policy = yaml.safe_load(kit.POLICY) | {"manage": managed(host), "rules": yaml.safe_load(SILENCE)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.owned())
        for netns, name, addresses in ((host.netns, "h1", PEER.values()), (host.peer, "h2", sources)):
            stack.enter_context(agent(netns, name, addresses, tmp_path))
        client = Client(directories.agent_socket(host.netns), frozenset({"path_liveness", "path_state"}))
        heard = stack.enter_context(contextlib.closing(client))
        traffic = stack.enter_context(contextlib.closing(Traffic(host.netns, host.peer, SOURCE, PEER, host.device)))
        controller = stack.enter_context(
            kit.controlled(host, kit.policy_file(tmp_path, yaml.safe_dump(policy)), "--apply")
        )

        def silent():
            for each in heard.read():
                if isinstance(each, PathLiveness):
                    live[each.path] = each.missed
                elif isinstance(each, PathState):
                    states[each.path] = each.state
            return sorted(path.interface for path, missed in live.items() if missed >= 3)

        def healthy():
            return not silent() and sorted((path.interface, state) for path, state in states.items()) == [
                (f"rail{rail}", "healthy") for rail in RAILS for _ in FAMILIES
            ]

        support.wait_until(healthy, 40, "every path answers, and the controller knows it")
        traffic.unharmed()
        before = host.others()
        with features.loaded(DROP) as drop:
            with inside(host.peer):
                cut = attach.attach_tc(drop, "rail1", "ingress")
            with cut:
                support.wait_until(lambda: silent() == ["rail1"] * len(FAMILIES), 20, "rail 1 is silent")
                support.wait_until(lambda: host.uses(host.drained), 60, "it is left")
                lost, sent = traffic.lost, dict(traffic.sent)
                traffic.flows()
                support.wait_until(lambda: all(traffic.sent[f] > sent[f] + 200 for f in FAMILIES), 20, "more is sent")
                support.wait_until(lambda: all(traffic.lost[f] <= lost[f] for f in FAMILIES), 20, "no more is lost")
                assert host.others() == before
        support.wait_until(lambda: host.uses(host.first) and healthy(), 40, "it carries packets again")
        traffic.unharmed(lost=max(traffic.lost.values()))
        assert controller.end() == 0
        assert host.uses(host.first) and host.ours() == 0 and host.others() == before


@contextlib.contextmanager
def agent(netns, name, addresses, folder):
    """An agent with a peer for each address, one of which a route without `src` sends from."""
    peers = [{"name": f"peer{n}", "address": each, "clock": "shared"} for n, each in enumerate(addresses)]
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"host": name, "peers": peers}))
    process = subprocess.Popen([*support.SWERVE, "agent", "-n", netns, "--config", str(file)])
    try:
        support.wait_until(directories.agent_socket(netns).exists, 30, "the agent serves")
        yield
    finally:
        process.terminate()
        process.wait()
        directories.base_delays(netns).unlink(missing_ok=True)


def managed(host):
    """What a policy manages of a host."""
    return {"destinations": ["10.9.0.0/16", "fd00:9::/64"], **host.manage}


RENEWALS = int(os.environ.get("SWERVE_TEST_RENEWALS", "1"))
LEASED = {name: kind for name, kind in KINDS.items() if issubclass(kind, route_kinds.Leased)}


@pytest.mark.parametrize("kind", LEASED.values(), ids=LEASED, indirect=True, scope="module")
def test_what_is_renewed_changes_nothing_of_ours(steered):
    """Leases that are renewed, and routers that are heard again."""
    steered.drain()
    ours = steered.host.rows("route", "show", "table", "20000")
    with Writes(steered.host.netns) as writes:
        for _ in range(RENEWALS):
            steered.host.renewed()
            assert steered.host.rows("route", "show", "table", "20000") == ours
        assert not writes.by(steered.controller.process.pid, steered.controller.guardian())
    assert steered.host.uses(steered.host.drained) and steered.host.others() == steered.before
    steered.undrain()
    steered.traffic.unharmed()


def test_a_hop_that_they_withdraw_is_left(steered):
    steered.drain()
    steered.host.withdraw()
    steered.comes_to(steered.host.withdrawn)
    steered.traffic.unharmed()
    steered.host.restore()
    steered.comes_to(steered.host.drained)  # the hop joins; rail 1 stays left
    steered.undrain()
    steered.theirs_are_back()
    steered.traffic.unharmed()


def test_an_order_is_kept_when_both_are_killed_and_when_they_are_ended(steered):
    steered.drain()
    steered.kill_both()
    assert steered.host.ours("rule") > 0 and steered.host.uses(steered.host.drained), "nobody was left to undo"
    assert steered.host.others() == steered.before
    steered.traffic.unharmed()
    steered.start()
    steered.comes_to(steered.host.drained)
    assert steered.controller.end() == 0
    steered.is_gone()
    steered.start()
    steered.comes_to(steered.host.drained)
    assert steered.host.others() == steered.before
    steered.undrain()
    steered.traffic.unharmed()


# Of these `off` is tried on leftovers as well.
KILLED = KINDS.values() if chosen else (route_kinds.NexthopGroup, route_kinds.Frr, route_kinds.Networkd)


def test_off_removes_all(steered):
    for killed in (False, True) if type(steered.host) in KILLED else (False,):
        steered.drain()
        if killed:
            steered.kill_both()
        support.swerve("steer", "off", "-n", steered.host.netns)
        steered.is_gone()
        steered.traffic.unharmed()
        steered.forget_orders()


RESTARTED = (route_kinds.Networkd, route_kinds.NetworkdLeased)
ANEW = {name: kind for name, kind in KINDS.items() if kind in RESTARTED}


@pytest.mark.parametrize("kind", ANEW.values(), ids=ANEW, indirect=True, scope="module")
def test_routes_that_their_owner_deletes_and_makes_again_are_steered_as_before(steered):
    steered.drain()
    steered.host.restart()
    steered.comes_to(steered.host.drained)
    steered.theirs_are_back()
    steered.comes_to(steered.host.drained)
    steered.traffic.errors.clear()  # the owner left packets without a route
    steered.undrain()
    steered.traffic.unharmed(lost=IN_FLIGHT)


@pytest.mark.parametrize("kind", [route_kinds.Networkd], ids=["networkd"], indirect=True, scope="module")
def test_networkd_deletes_our_rules_when_it_is_started_again_and_they_are_made_again(steered):
    steered.drain()
    with Writes(steered.host.netns) as writes:
        networkd = steered.host.restart()
        deleted = ("no rule", "")
        support.wait_until(lambda: writes.by(networkd)[deleted] >= len(FAMILIES), 20, "it deletes our rules")
        support.wait_until(lambda: steered.host.ours("rule") >= len(FAMILIES), 10, "they are made again")
        support.wait_until(lambda: writes.by(steered.controller.process.pid)["rule", ""] >= len(FAMILIES), 10, "by us")
    steered.comes_to(steered.host.drained)
    steered.theirs_are_back()
    steered.undrain()
    steered.traffic.unharmed()


@pytest.mark.parametrize("kind", WITH_STATIC.values(), ids=WITH_STATIC, indirect=True, scope="module")
def test_a_carrier_that_is_lost_is_left_and_comes_back(steered, make_namespace):
    """The last one of a host: FRR as installed never has all its hops again, as where there is no swerve."""
    host = steered.host
    steered.drain()
    steered.agent.queueing_ns[2] = None
    host.cable(2, there=False)
    steered.comes_to(host.withdrawn)
    steered.traffic.unharmed(lost=IN_FLIGHT)
    host.cable(2, there=True)
    steered.agent.queueing_ns[2] = 0
    if not host.regains:
        seen = steered.agent.published
        support.wait_until(lambda: steered.agent.published > seen + 300, 20, "all that is measured is good")
        assert host.uses(host.withdrawn), "their group is without it, and so is ours"
        reasons = [state.reason for path, state in steered.agent.states.items() if path.interface == "rail2"]
        assert reasons and all(why.startswith("no managed route has this nexthop") for why in reasons)
    if host.restorable:
        host.restore()
        support.wait_until(lambda: all(host.used(family) >= host.drained for family in FAMILIES), 30, "it is back")
        steered.undrain()
        steered.theirs_are_back()
    else:
        assert steered.ask(requests.Undrain("rail1")).code == 0
        support.wait_until(lambda: host.uses(host.first - {2}), 20, "what they have left")
        assert host.ours("rule") == 0
        alone = type(host)(make_namespace(), make_namespace())
        with alone.owned():
            every = alone.hops()
            alone.cable(2, there=False)
            support.wait_until(lambda: alone.believed() == alone.hops() < every, 30, "FRR has left it")
            alone.cable(2, there=True)
            for each in (alone, host):
                support.wait_until(lambda each=each: each.believed() == every, 30, "FRR takes it for installed")
            assert host.hops() == alone.hops() == {hop for hop in every if hop[1] != 2}
    steered.traffic.unharmed(lost=IN_FLIGHT)
