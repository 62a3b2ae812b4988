"""What a compiled program depends on, as digests of content: equal inputs have an equal key on every host.

A key has two parts. The first is the program: its sources with all headers of ours that they include, its constants,
entry points and type of machine, and how we compile. The second is the compiler: bcc, the libraries of LLVM, the
headers of the distribution. A host that cannot compile has no second part, and takes what another compiler made.

The running kernel is no input. Programs use stable interfaces only, so its BTF does not matter; what it can do is
tested (pytools/sources/programs.py) and arrives here as constants. bcc itself looks for one function in it,
`bpf_probe_read_user` (5.5), and all kernels that have a ring buffer (5.8), which we need, have it. For the compiling
child too, hence the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytools.kernel.elf import build_id

LETTERS: Final = 32  # of each part of a key: 128 bits
SYSTEM: Final = Path("/usr/include")
_HERE: Final = Path(__file__).parent
_HOW: Final = ("compiler.py", "cache.py")  # what they do with a source is part of what comes out
_INCLUDE: Final = re.compile(rb'^[ \t]*#[ \t]*include(?:_next)?[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
# In bcc's library: others that it needs, and what the headers include that it holds as text. Both begin with plain
# letters, which makes the search quick.
_NEEDED: Final = re.compile(rb"lib(?:LLVM|clang)[\w.+-]*\.so[\w.]*")
_HELD: Final = re.compile(rb"#include <([^>\n]+)>")
_ESSENTIAL: Final = ("linux/types.h", "linux/version.h")  # the second one tells releases apart


def machine() -> str:
    """The type of machine that programs are made for."""
    return sysconfig.get_platform()


def _multiarch() -> str:
    return sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu"


def flags(bpf_dir: str) -> list[str]:
    """For the compiler: where headers are, ours last."""
    return [f"-I{SYSTEM}", f"-I{SYSTEM / _multiarch()}", f"-I{bpf_dir}", "-Wno-macro-redefined"]


@dataclass(frozen=True)
class Inputs:
    program: Mapping[str, Any]  # empty for a program that is not ours
    compiler: Mapping[str, Any]  # empty where nothing compiles
    lacking: str = ""  # why nothing does, for a program of ours

    @property
    def prefix(self) -> str:
        """What the names of all entries for this program begin with; empty for one that is not kept."""
        return f"{digest(self.program)[:LETTERS]}." if self.program else ""

    @property
    def name(self) -> str:
        """The name of its entry; empty for one that is not kept."""
        return f"{self.prefix}{digest(self.compiler)[:LETTERS]}" if self.program and self.compiler else ""


def digest(content: object) -> str:
    """Of what JSON can hold, whatever the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def inputs(program: Mapping[str, Any], bpf_dir: str, package: str) -> Inputs:
    """What a program would be made from on this host.

    Parameters
    ----------
    program : mapping
        As in the request to the child: source, defines, functions.
    bpf_dir : str
        Where our sources are.
    package : str
        Where bcc is; empty: nowhere.
    """
    ours, named = _ours(program["source"], Path(bpf_dir))
    if not ours:
        return Inputs({}, {})
    how = {name: _digest_of(_HERE / name) for name in _HOW}
    asked = {name: program[name] for name in ("source", "defines", "functions")}
    made_from = {**asked, "machine": machine(), "sources": digest({**ours, **how})}
    try:
        return Inputs(made_from, compiler(named, package))
    except OSError as error:
        return Inputs(made_from, {}, f"no {error.filename or 'compiler'}")


def compiler(named: Iterable[str], package: str) -> dict[str, Any]:
    """What compiles here, and the headers that go in.

    Parameters
    ----------
    named : iterable of str
        Headers that our sources include.
    package : str
        Where bcc is.

    Raises
    ------
    FileNotFoundError
        If something is missing; its file name is what.
    """
    if not package:
        raise FileNotFoundError(2, "missing", "bcc for Python (python3-bpfcc)")
    modules = {each.name: _digest_of(each) for each in sorted(Path(package).glob("*.py"))}
    library = _library("libbcc.so.0")
    content = library.read_bytes()
    needed = sorted({each.decode() for each in _NEEDED.findall(content)})
    libraries = {each.name: _identity(each) for each in (library, *map(_library, needed))}
    headers = _system_headers([*named, *(each.decode(errors="replace") for each in _HELD.findall(content))])
    for name in _ESSENTIAL:
        if name not in headers:
            raise FileNotFoundError(2, "missing", f"{SYSTEM / name} (linux-libc-dev)")
    return {"bcc": digest(modules), "libraries": libraries, "headers": digest(headers), "flags": flags("bpf")}


def _ours(source: str, bpf_dir: Path) -> tuple[dict[str, str], list[str]]:
    """The digest of each source of ours that goes into a program, and all names that these include."""
    if not (bpf_dir / source).is_relative_to(bpf_dir):
        return {}, []
    stand_ins = bpf_dir / "include"  # bcc includes them by itself
    roots = [source, *(str(each.relative_to(bpf_dir)) for each in stand_ins.rglob("*.h"))]
    return _closure(roots, bpf_dir, [bpf_dir, stand_ins])


def _system_headers(named: Iterable[str]) -> dict[str, str]:
    return _closure([*named, *_ESSENTIAL], SYSTEM, [SYSTEM, SYSTEM / _multiarch()])[0]


def _closure(roots: Iterable[str], top: Path, places: Sequence[Path]) -> tuple[dict[str, str], list[str]]:
    """The digests of files by their names below `top`, with all that they include, and the names that were looked for.

    Conditions are not looked at, and of files of one name all count: rather too many than one too few.
    """
    files: dict[str, str] = {}
    left, seen = list(roots), set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        for place in places:
            try:
                content = (place / name).read_bytes()
            except OSError:
                continue
            files[str((place / name).relative_to(top))] = hashlib.sha256(content).hexdigest()
            left += [each.decode(errors="replace") for each in _INCLUDE.findall(content)]
    return files, sorted(seen)


def _library(name: str) -> Path:
    """Where the dynamic linker finds a library.

    Raises
    ------
    FileNotFoundError
        If it does not.
    """
    asked = [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    usual = [Path(top, each) for top in ("/usr/local", "/usr") for each in (f"lib/{_multiarch()}", "lib64", "lib")]
    for place in (*asked, *usual):
        if (place / name).exists():
            return place / name
    raise FileNotFoundError(2, "missing", name)


def _identity(library: Path) -> str:
    """What differs for another content: the linker's identifier, or a digest where there is none."""
    return build_id(str(library)) or _digest_of(library)


def _digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
