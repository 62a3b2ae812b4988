"""A booted machine as a host with two peers: its cables, its configuration, and what is looked at there.

The peers are namespaces with an agent each, which root started: those are not what is tried. One thread.
"""

from __future__ import annotations

from typing import Any

from _booted import Machine

_AGENT = """\
host: here
peers:
  - {name: near, address: 10.78.0.2, clock: shared}
  - {name: far, address: 10.79.0.2, clock: shared}
recording: {fine: 1MiB, coarse: 1MiB}
"""
# Another peer, which is taken up, and another window, which waits for a restart.
RELOADED = (
    _AGENT.replace("recording", "  - {name: third, address: 10.78.0.3, clock: shared}\nrecording")
    + "windows: {short: 100ms}\n"
)
_PEER = "host: {name}\npeers: [{{name: here, address: {ours}, clock: shared}}]\nrecording: {{retention: 0s}}\n"
_POLICY = """\
version: 1
manage: {destinations: [10.78.0.0/24]}
rules:
  - name: leave-silent-rail
    when: {signal: silence, missed: 3}
    then: {drain: {}}
    return: {dwell: 2s, retry_after: 10s, steps: [1.0], step: 500ms}
  - name: leave-congested-rail
    when: {signal: queueing_delay, quantile: p50, above: 500ms, for: 1s, clear_below: 100ms}
    then: {shift: {share: 0}}
    return: {dwell: 30s, steps: [1.0], step: 3s}
"""
CONFIGURATION = {  # by file
    "agent": _AGENT,
    "policy": _POLICY,
    "near": _PEER.format(name="near", ours="10.78.0.1"),
    "far": _PEER.format(name="far", ours="10.79.0.1"),
}
# near has addresses behind two rails, each a router of its own; far has one cable.
_NETWORK = """\
set -e
for name in near far r1 r2; do ip netns add $name; done
for cable in r1:rail1:10.77.1 r2:rail2:10.77.2 far:cable:10.79.0; do
    IFS=: read -r peer name net <<<"$cable"
    ip link add $name type veth peer name $name netns $peer
    ip address add $net.1/24 dev $name
    ip link set $name up
    ip -n $peer address add $net.2/24 dev $name
    ip -n $peer link set $name up
    ip -n $peer link set lo up
done
for rail in 1 2; do
    ip -n r$rail link add near type veth peer name rail$rail netns near
    ip -n r$rail address add 10.77.1$rail.1/24 dev near
    ip -n r$rail link set dev near up
    ip -n near address add 10.77.1$rail.2/24 dev rail$rail
    ip -n near link set rail$rail up
    ip netns exec r$rail bash -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
    ip -n r$rail route add 10.78.0.1 via 10.77.$rail.1
    for address in 2 3; do ip -n r$rail route add 10.78.0.$address via 10.77.1$rail.2; done
done
echo 1 >/proc/sys/net/ipv4/fib_multipath_hash_policy
ip address add 10.78.0.1/32 dev lo
ip nexthop add id 1 via 10.77.1.2 dev rail1
ip nexthop add id 2 via 10.77.2.2 dev rail2
ip nexthop add id 10 group 1/2
ip route add 10.78.0.2 nhid 10 src 10.78.0.1
ip route add 10.78.0.3 nhid 10 src 10.78.0.1
ip -n near address add 10.78.0.2/32 dev lo
ip -n near address add 10.78.0.3/32 dev lo
ip -n near route add 10.78.0.1 src 10.78.0.2 nexthop via 10.77.11.1 nexthop via 10.77.12.1
"""


# What comes from here into a rail is lost without a word; the way back is whole.
SILENT = ("rule", "{verb}", "pref", "10", "iif", "rail1", "blackhole")


def silence(machine: Machine, verb: str) -> None:
    """Let the first rail lose what comes from here (`add`), or no more (`delete`)."""
    machine.run("ip", "-n", "r1", *(word.format(verb=verb) for word in SILENT))


def network(machine: Machine) -> dict[str, object]:
    """Cables, and the agents of the peers: those are root's, and not what is tried here."""
    machine.run("bash", "-c", _NETWORK)
    for name in ("near", "far"):
        places = (f"--setenv=SWERVE_{kind}_DIR=/run/peers/{kind}" for kind in ("RUNTIME", "STATE"))
        command = ("swerve", "agent", f"--netns={name}", f"--config=/etc/swerve/{name}.yaml")
        machine.run("systemd-run", "--quiet", f"--unit=peer-{name}", *places, *command)
    state = machine.run("systemctl", "is-system-running", "--wait")
    return {"ok": state == "running", "systemd": machine.run("systemctl", "--version").split()[1], "state": state}


def measured(machine: Machine, peers: set[str]) -> dict[str, str]:
    """One-way delays there and back, in words, once every path to these peers has them without a loss."""
    told = [each for each in machine.lines("swerve", "delay", "--json") if each["type"] == "path_delay"]
    whole = [each for each in told if each["clock"] == "synchronised" and each["received"] and not each["lost"]]
    if {each["path"]["destination"] for each in whole} != peers or len(whole) != len(told):
        return {}
    return {
        f"{each['path']['destination']} by {each['path']['interface']}": " ".join(
            f"{each[way]['owd_p50_ns']} ± {each[way]['bound_ns']} ns" for way in ("forward", "reverse")
        )
        for each in whole
    }


def steering(machine: Machine) -> dict[str, Any]:
    """What the controller says of itself; empty until one that steers answers and knows the paths."""
    status: dict[str, Any] = machine.json("swerve", "steer", "status", "--json")
    return status if status["running"] and status.get("answers") and status["paths"] else {}


def weights(machine: Machine) -> dict[str, int]:
    """The weights that decide about packets to the near peer, by interface."""
    (route,) = machine.json("ip", "-json", "route", "get", "fibmatch", "10.78.0.2")
    return {hop["dev"]: hop.get("weight", 1) for hop in route.get("nexthops", [route])}


def said_of(machine: Machine, unit: str, words: str) -> list[dict[str, Any]]:
    """What the journal has of a unit's own processes with these words."""
    told = machine.lines("journalctl", "--unit", unit, "--output=json", "--no-pager")
    return [each for each in told if each.get("_SYSTEMD_UNIT") == unit and words in each["MESSAGE"]]


def inventory(machine: Machine) -> set[str]:
    """What of ours could be left there: rules, routes, objects, filters, interfaces, sockets."""
    found = set(machine.run("find", "/run/swerve", "-not", "-type", "d", check=False).splitlines())
    for words in (
        *(f"ip {family} {what}" for family in ("-4", "-6") for what in ("rule", "route show table all", "nexthop")),
        *("ip -o link", "tc qdisc"),
        *(f"tc filter show dev {name} {way}" for name in ("rail1", "rail2", "cable") for way in ("ingress", "egress")),
    ):
        lines = machine.run(*words.split(), check=False).splitlines()
        found |= {f"{words}: {line.strip()}" for line in lines if "proto kernel" not in line}
    return found
