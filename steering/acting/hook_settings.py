"""A hook as it is remembered in /run: whoever ends what it was told may have another policy, or none. Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from steering.policy.hooks import STATE_KINDS, Hook


class Settings(msgspec.Struct, frozen=True):
    name: str
    kind: str
    options: str  # JSON
    lease_ns: int
    timeout_ns: int
    tries: int
    count: int
    per_ns: int

    @property
    def of_state(self) -> bool:
        """Whether its far end has one state, not one event for each occurrence."""
        return self.kind in STATE_KINDS

    @property
    def to(self) -> str:
        """Whom it tells, for people."""
        of = json.loads(self.options)
        match self.kind:
            case "webhook":
                return f"POST {of['url']}"
            case "slurm":
                return f"{of['scontrol']} for {_node(of)}"
            case "kubernetes":
                taint = of.get("taint")
                what = f"taint {taint['key']}:{taint['effect']}" if taint else f"condition {of['condition']}"
                return f"{what} of {_node(of)}"
            case _:
                return " ".join((of["program"], *of["arguments"]))


def _node(options: dict[str, Any]) -> str:
    return f"node {options['node']}" if options.get("node") else "this host's node"


def settings_of(name: str, hook: Hook) -> Settings:
    options = json.dumps(hook.options.model_dump(mode="json", exclude_none=True), sort_keys=True)
    return Settings(name, hook.kind, options, hook.lease, hook.timeout, hook.tries, hook.limit.count, hook.limit.per)
