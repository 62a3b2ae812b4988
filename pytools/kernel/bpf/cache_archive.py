"""Compiled programs as one file that travels: a plain tar archive of a manifest and entries of the cache.

Nothing of a file is used before all of it has been verified: it is read as `write` makes it, member after member, and
whatever else tar can say (links, directories, long or other names, attributes) is refused. That the instructions are
those of the sources cannot be verified: who imports trusts who exported (docs/threats.md).
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from pytools import directories
from pytools.errors import RefusedError, SwerveError, UsageError
from pytools.kernel.bpf import cache, cache_key

SCHEMA: Final = 1
MOST_BYTES: Final = cache.MOST_ENTRIES * cache.MOST_BYTES  # of an archive
_MANIFEST: Final = "manifest.json"
_FOLDER: Final = "objects/"
_DIGITS: Final = frozenset("0123456789abcdef")
_BLOCK: Final = tarfile.BLOCKSIZE
_Shape = TypeVar("_Shape")


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record in which nothing may be too much."""


class MadeProgram(_Strict, frozen=True):
    """What was compiled; `sources` is a digest of all files of ours that went in."""

    source: str
    defines: dict[str, int | str]
    functions: list[tuple[str, str]]
    machine: str
    sources: str


class MadeBy(_Strict, frozen=True):
    """What compiled it: digests of bcc's modules and of the headers, identifiers of the libraries."""

    bcc: str
    libraries: dict[str, str]
    headers: str
    flags: list[str]


class MadeFrom(_Strict, frozen=True):
    """All that the name of an entry is a digest of."""

    program: MadeProgram
    compiler: MadeBy

    @property
    def name(self) -> str:
        made = msgspec.to_builtins(self)
        return cache_key.Inputs(made["program"], made["compiler"]).name


class _Reply(_Strict, frozen=True):
    source: str
    error: str
    descriptors: list[str]
    maps: dict[str, dict[str, Any]]
    failed: dict[str, str]


class Entry(_Strict, frozen=True):
    """What is in a file of the cache: how it was made, and what cache.py loads."""

    made_from: MadeFrom
    reply: _Reply
    maps: list[tuple[str, int, int, int, int, int]]
    functions: list[tuple[str, str, int, int, str, str]]


class Object(_Strict, frozen=True):
    """One member, as the manifest describes it."""

    name: str
    bytes: int
    sha256: str
    made_from: MadeFrom


class Manifest(_Strict, frozen=True):
    schema: int
    objects: list[Object]


def entry_of(body: bytes) -> Entry:
    """What an entry says.

    Raises
    ------
    ValueError
        If it is none.
    """
    try:
        return msgspec.json.decode(body, type=Entry)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def packed(entries: Mapping[str, bytes]) -> bytes:
    """An archive of these entries of the cache; equal ones give equal bytes."""
    objects = [
        Object(name, len(body), hashlib.sha256(body).hexdigest(), entry_of(body).made_from)
        for name, body in sorted(entries.items())
    ]
    members = {_MANIFEST: msgspec.json.encode(Manifest(SCHEMA, objects))}
    members |= {f"{_FOLDER}{name}": body for name, body in sorted(entries.items())}
    return b"".join(_member(name, body) for name, body in members.items()) + bytes(2 * _BLOCK)


def _member(name: str, body: bytes) -> bytes:
    about = tarfile.TarInfo(name)
    about.size = len(body)
    return about.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % _BLOCK)


def write(out: Path, entries: Mapping[str, bytes]) -> int:
    """Write a new archive; returns its size.

    Raises
    ------
    UsageError
        If the file is there already, or cannot be made.
    """
    content = packed(entries)
    try:
        with out.open("xb") as file:
            file.write(content)
    except FileExistsError:
        raise UsageError(f"{out} exists", "name another file, or remove it") from None
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from None
    return len(content)


def read(file: Path) -> dict[str, bytes]:
    """The entries in an archive by name, all of them verified.

    Raises
    ------
    UsageError
        If the file cannot be read.
    RefusedError
        If somebody else could have written it, or anything in it is not as `write` makes it.
    """
    try:
        content = directories.read_obeyed(file, MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    try:
        return unpacked(content)
    except ValueError as error:
        step = "export it again, and compare the checksum on both hosts"
        raise RefusedError(f"{file}: refused: {error}; nothing was imported", step) from None


@dataclass
class Taken:
    """What became of the entries of an archive; `refused` by name, each with the reason."""

    imported: list[str] = field(default_factory=list)
    already_there: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def take(entries: Mapping[str, bytes], own: str) -> Taken:
    """Put verified entries into this user's directory: all that fit this host, or none.

    One that is there already stays, unless nothing could be loaded from it.

    Raises
    ------
    SwerveError
        If they cannot be written.
    RefusedError
        If somebody else could write in the directory.
    """
    found = Taken()
    try:
        at = cache.opened(own, make=True)
        try:
            shelf = cache.Shelf(own)
            for name, body in entries.items():
                made, there = entry_of(body).made_from.program, shelf.read(name)
                if made.machine != cache_key.machine():
                    found.refused[name] = f"{made.source} is for {made.machine}, and this is {cache_key.machine()}"
                elif there == body:
                    found.already_there.append(name)
                elif there is not None and is_entry(there):
                    found.refused[name] = f"{made.source} is there already, with other instructions"
                else:
                    found.imported.append(name)
            cache.put(at, {name: entries[name] for name in found.imported}, durable=True)
        finally:
            os.close(at)
    except OSError as error:
        raise SwerveError(f"{own} cannot be written: {error.strerror}; nothing was imported") from None
    return found


def is_entry(body: bytes) -> bool:
    """Whether this can be an entry."""
    try:
        entry_of(body)
    except ValueError:
        return False
    return True


def unpacked(content: bytes) -> dict[str, bytes]:
    """What `packed` was given.

    Raises
    ------
    ValueError
        If it did not make this, and why.
    """
    if len(content) > MOST_BYTES:
        _refuse(f"it has more than {MOST_BYTES} bytes")
    members = _members(content)
    manifest = _decoded(members.pop(_MANIFEST, b""), Manifest, "its manifest")
    if manifest.schema != SCHEMA:
        _refuse(f"its manifest has schema {manifest.schema}, and this swerve knows {SCHEMA}")
    listed = {f"{_FOLDER}{each.name}": each for each in manifest.objects}
    if len(listed) != len(manifest.objects) or listed.keys() != members.keys():
        _refuse("the manifest lists other objects than there are")
    for place, each in listed.items():
        body = members[place]
        if (len(body), hashlib.sha256(body).hexdigest()) != (each.bytes, each.sha256):
            _refuse(f"{place} is damaged: size or SHA-256 differ from the manifest")
        made_from = _decoded(body, Entry, place).made_from
        if made_from != each.made_from or made_from.name != each.name:
            _refuse(f"{place} was made from something else than its name says")
    return {each.name: members[place] for place, each in listed.items()}


def _members(content: bytes) -> dict[str, bytes]:
    """Every member by name: plain files, each once, and nothing behind them."""
    found: dict[str, bytes] = {}
    at = 0
    while any(block := content[at : at + _BLOCK]):
        try:
            about = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.TarError, ValueError):
            _refuse(f"there is no tar header at byte {at}")
        name, size = about.name, about.size
        if about.type != tarfile.REGTYPE:
            _refuse(f"{name!r} is not a plain file")
        if name != _MANIFEST and not _is_name(name.removeprefix(_FOLDER) if name.startswith(_FOLDER) else ""):
            _refuse(f"{name!r} is not the name of an object")
        if name in found:
            _refuse(f"{name} is there twice")
        if not 0 <= size <= cache.MOST_BYTES or len(found) > cache.MOST_ENTRIES:
            _refuse(f"{name} is too large ({size} bytes)" if len(found) <= cache.MOST_ENTRIES else "too many objects")
        at += _BLOCK
        found[name] = content[at : at + size]
        if len(found[name]) < size:
            _refuse("it is cut off")
        at += size + -size % _BLOCK
    if any(content[at:]) or len(content) - at < 2 * _BLOCK:
        _refuse("it does not end as it should")
    return found


def _is_name(name: str) -> bool:
    program, _, compiler = name.partition(".")
    return all(len(each) == cache_key.LETTERS and set(each) <= _DIGITS for each in (program, compiler))


def _decoded(body: bytes, shape: type[_Shape], what: str) -> _Shape:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, RecursionError) as error:
        _refuse(f"{what} cannot be understood: {error}")


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)
