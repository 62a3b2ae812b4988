"""Where files live: one instance of swerve per network namespace, each with its own directories.

An instance is called by the namespace's name, or `host` for the namespace the host itself lives in.
"""

from __future__ import annotations

import os
from pathlib import Path


def instance(netns: str | None) -> str:
    """The name under which this namespace's files are kept."""
    return netns if netns else "host"


def runtime_dir(netns: str | None) -> Path:
    """Sockets, leases and lab configurations: gone after a reboot."""
    return Path(os.environ.get("SWERVE_RUNTIME_DIR", "/run/swerve")) / instance(netns)


def state_dir(netns: str | None) -> Path:
    """The journal: survives a reboot."""
    return Path(os.environ.get("SWERVE_STATE_DIR", "/var/lib/swerve")) / instance(netns)


def agent_socket(netns: str | None) -> Path:
    """The agent's control socket: signals out, requests and published signals in."""
    return runtime_dir(netns) / "agent.sock"


def tap_socket(netns: str | None) -> Path:
    """Where tapped RDMA processes, of any user, ask the agent for the table that they count in."""
    directory = runtime_dir(netns)  # itself for its owner alone
    return directory.parent / f"{directory.name}.tap"


def default_config(netns: str | None) -> Path:
    """The agent's configuration when `--config` is not given: the instance's own, else the host's."""
    own = runtime_dir(netns) / "agent.yaml"
    return own if own.exists() else Path("/etc/swerve/agent.yaml")
