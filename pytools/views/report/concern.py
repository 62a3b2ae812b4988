"""Which paths and groups an act is about: by what its target is called, and by which prefixes lie behind it. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pytools.signals import NexthopGroup, Path
from pytools.views.report.records import NumberedAct, PathStory

_ROUTES: Final = re.compile(r"overlay:[^:]*:(?P<prefix>.+)")


def acts_of_group(acts: Iterable[NumberedAct], group: NexthopGroup) -> tuple[int, ...]:
    """Numbers of the acts on what a group carries."""
    return tuple(
        each.number
        for each in acts
        if each.act.host == group.host and not set(prefixes_of(each.act.target)).isdisjoint(group.destinations)
    )


def acts_by_path(
    paths: Sequence[Path], acts: Iterable[NumberedAct], groups: Iterable[NexthopGroup]
) -> dict[Path, tuple[int, ...]]:
    """Numbers of the acts that each path is about to feel.

    An act concerns the paths of its host to what lies behind its target; where that is not known, all of its host.
    """
    destinations = {
        (group.host, prefix): tuple(group.destinations) for group in groups for prefix in group.destinations
    }
    found: dict[Path, list[int]] = {path: [] for path in paths}
    reached: dict[tuple[tuple[str, ...], str], bool] = {}
    for each in acts:
        prefixes = prefixes_of(each.act.target)
        if prefixes:
            prefixes = destinations.get((each.act.host, prefixes[0]), prefixes)
        for path in paths:
            if path.source != each.act.host:
                continue
            key = (prefixes, path.address)
            if key not in reached:
                reached[key] = not prefixes or any(_inside(path.address, prefix) for prefix in prefixes)
            if reached[key]:
                found[path].append(each.number)
    return {path: tuple(dict.fromkeys(numbers)) for path, numbers in found.items()}


def with_acts(story: PathStory, numbers: Mapping[Path, tuple[int, ...]]) -> PathStory:
    """A path with the acts that concern it."""
    return replace(story, acts=numbers.get(story.path, ()))


def prefixes_of(target: str) -> tuple[str, ...]:
    """The prefix that a target of acts is named after; empty for what has none."""
    match = _ROUTES.fullmatch(target)
    return (match["prefix"],) if match else ()


def _inside(address: str, prefix: str) -> bool:
    """Whether a prefix covers an address; what cannot be read is taken to."""
    try:
        inside = ipaddress.ip_address(address)
        network = ipaddress.ip_network(("::/0", "0.0.0.0/0")[inside.version == 4] if prefix == "default" else prefix,
                                       strict=False)  # fmt: skip
    except ValueError:
        return True
    return inside.version == network.version and inside in network
