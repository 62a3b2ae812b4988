"""What is known of labs from outside: their names, the file beside each, and how to remove one without a trace.

Everything a lab consists of is found by names and marks; the file only says how it was meant to be.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from pytools import directories
from pytools.errors import UsageError
from pytools.lab import namespaces, processes
from pytools.lab.topology import Spec, check_name, lab_of_namespace, namespace_pattern

_FIELDS = ("name", "hosts", "rails", "rate_bit_s", "queue_bytes", "ipv6", "inner", "over")


def reserve(spec: Spec) -> None:
    """Take the name: from here on `tear_down` knows that there is something to remove.

    Raises
    ------
    UsageError
        If the name is taken, or something of an earlier lab of this name is left.
    """
    taken = UsageError(
        f"lab {spec.name} already exists", f"use another --name, or remove it with `swerve lab down --name {spec.name}`"
    )
    if _namespaces_of(spec.name):
        raise taken
    place = _file(spec.name)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with place.open("xb") as file:
            file.write(msgspec.json.encode({name: getattr(spec, name) for name in _FIELDS}))
    except FileExistsError:
        raise taken from None


def recall(name: str) -> Spec:
    """How a lab that is up was made.

    Raises
    ------
    UsageError
        If there is none of this name, or what it was made with is lost.
    """
    check_name(name)
    try:
        return Spec(**msgspec.json.decode(_file(name).read_bytes()))
    except FileNotFoundError:
        pass
    except (msgspec.DecodeError, TypeError) as error:
        raise UsageError(f"{_file(name)}: {error}", f"`swerve lab down --name {name}` removes the lab") from None
    if _namespaces_of(name):
        raise UsageError(f"lab {name} exists without its description", f"`swerve lab down --name {name}` removes it")
    known = f"up: {', '.join(labs())}" if labs() else "none is up"
    raise UsageError(f"there is no lab {name} ({known})", f"`swerve lab up --name {name}` makes it")


def labs() -> list[str]:
    """Names of all labs that are up, or of which something is left."""
    found = {lab_of_namespace(netns) for netns in namespaces.names()}
    found |= {place.stem for place in _file("x").parent.glob("*.*")}
    return sorted(name for name in found if name)


def tear_down(name: str) -> list[str]:
    """Remove everything that a lab of this name left, also when how it was made is not known.

    Returns
    -------
    list of str
        Processes that the lab did not start and that keep a namespace alive: left alone.
    """
    check_name(name)
    processes.end(name)
    ours = _namespaces_of(name)
    foreign = processes.within(ours)
    for netns in ours:
        namespaces.delete(netns)
    pattern = namespace_pattern(name)
    for base in (directories.runtime_dir(None).parent, directories.state_dir(None).parent):
        for place in base.glob(f"swerve-{name}-*"):
            if pattern.fullmatch(place.name):
                shutil.rmtree(place)
            elif pattern.fullmatch(place.stem):  # a socket beside it, of an agent that was killed
                place.unlink(missing_ok=True)
    key_file(name).unlink(missing_ok=True)
    _file(name).unlink(missing_ok=True)
    return [f"process {pid} ({line}) was not started by the lab" for pid, line in sorted(foreign.items())]


def key_file(name: str) -> Path:
    """Where the key lies that lets the agents of a lab talk to each other, if they may."""
    return _file(name).with_suffix(".key")


def _namespaces_of(name: str) -> list[str]:
    pattern = namespace_pattern(name)
    return [netns for netns in namespaces.names() if pattern.fullmatch(netns)]


def _file(name: str) -> Path:
    return directories.runtime_dir(None).parent / "labs" / f"{name}.json"
