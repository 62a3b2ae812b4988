"""The policy language: the model that a file becomes, reading and checking it, and saying it in words.

`file` alone does I/O. docs/policy.txt lists every key.
"""

from pytools.units import (
    UNITS,
    duration_text,
    duration_yaml,
    parse_duration,
    parse_rate,
    rate_text,
)
from steering.policy.actions import (
    FLOW_KINDS,
    KINDS,
    Action,
    Alert,
    Drain,
    Kind,
    Pin,
    PinFlows,
    Relabel,
    Return,
    Shift,
    Then,
)
from steering.policy.conditions import (
    OPPOSITES,
    All,
    AnyLeaf,
    AnyOf,
    CeShare,
    Condition,
    Leaf,
    LinkState,
    Loss,
    Not,
    QueueingDelay,
    Rdma,
    Retransmits,
    Silence,
    leaves,
)
from steering.policy.conditions_text import clear_text, condition_text
from steering.policy.explanation import explain, notes
from steering.policy.file import InvalidPolicyError, load, parse
from steering.policy.model import Herd, Manage, Moves, Policy, Rule, Safety
from steering.policy.schema import json_schema
from steering.policy.scope import FlowLike, Flows, Scope

__all__ = [
    "FLOW_KINDS",
    "KINDS",
    "OPPOSITES",
    "UNITS",
    "Action",
    "Alert",
    "All",
    "AnyLeaf",
    "AnyOf",
    "CeShare",
    "Condition",
    "Drain",
    "FlowLike",
    "Flows",
    "Herd",
    "InvalidPolicyError",
    "Kind",
    "Leaf",
    "LinkState",
    "Loss",
    "Manage",
    "Moves",
    "Not",
    "Pin",
    "PinFlows",
    "Policy",
    "QueueingDelay",
    "Rdma",
    "Relabel",
    "Retransmits",
    "Return",
    "Rule",
    "Safety",
    "Scope",
    "Shift",
    "Silence",
    "Then",
    "clear_text",
    "condition_text",
    "duration_text",
    "duration_yaml",
    "explain",
    "json_schema",
    "leaves",
    "load",
    "notes",
    "parse",
    "parse_duration",
    "parse_rate",
    "rate_text",
]
