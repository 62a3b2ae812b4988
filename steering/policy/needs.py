"""Which signals a policy needs, so that nothing else is sent to the controller. Pure."""

from __future__ import annotations

from typing import Final

from steering.policy.actions import FLOW_KINDS
from steering.policy.conditions import leaves
from steering.policy.model import Policy

_ALWAYS: Final = frozenset({"path_delay"})
_BY_CONDITION: Final = {
    "silence": {"path_liveness"},
    "retransmits": {"tcp_path"},
    "ce_share": {"path_ecn", "tcp_path"},
    "link": {"link", "link_event", "path_mtu", "rdma_port"},
    "rdma": {"rdma_qp"},
    "job_step": {"job"},
    "straggler": {"job"},
}


def signals_of(policy: Policy) -> frozenset[str]:
    """The kinds of signals, by their tags, that the rules of a policy look at."""
    found = set(_ALWAYS)
    if policy.ports is not None or policy.labels is not None:
        found |= {"path_way", "tcp_flow"}
    for rule in policy.rules:
        for leaf in leaves(rule.when):
            found |= _BY_CONDITION.get(leaf.signal, set())
        if rule.then.shift is not None and rule.then.shift.by != "share":
            found |= {"link"}
        if rule.then.kind in FLOW_KINDS:
            found |= {"tcp_flow", "link"}
    return frozenset(found)
