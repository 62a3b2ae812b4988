"""The child process that holds bcc and LLVM: compiles, loads, attaches tracepoints, hands the descriptors over, exits.

bcc costs 75 MB for its import and 125-230 MB a program; here that ends with the child. Runs as a script under any
interpreter that can import bcc, hence the standard library only; without `site` (-S), which is half of a start. What
was compiled before is loaded as it was kept (cache.py). One program, one request, one reply:

request   JSON: {"bpf_dir", "kept": [directory, ...], "compile", "package": where bcc is or "", "program": {"source",
          "defines", "functions": [[name, kind]]}}
reply     JSON: {"source", "error", "entry", "descriptors": [name, ...], "maps": {name: {"key", "value"}},
          "failed": {...}}, with the descriptors in the same order as ancillary data
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import json
import os
import re
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

_SOCK_ADDR = 18  # BPF_PROG_TYPE_CGROUP_SOCK_ADDR, which bcc does not name
_NUMPY_CODE = {"c": "S1", "?": "?"}
_ELSEWHERE = "`swerve cache export` on a host with a compiler, then `swerve cache import` here"
_PART = re.compile(r'#include "(\w+/\w+\.h|\w+\.c)"')


def use_headers(bpf_dir: str) -> None:
    """Point bcc at our headers, and away from what the user's environment says of others.

    bcc wants a kernel source tree: ours holds the few headers that it names, the rest are the distribution's.
    """
    for name in ("CPATH", "C_INCLUDE_PATH", "BCC_LINUX_VERSION_CODE", "BCC_KERNEL_MODULES_SUFFIX"):
        os.environ.pop(name, None)
    os.environ["BCC_KERNEL_SOURCE"] = bpf_dir


def whole(source: str, bpf_dir: str) -> Iterator[str]:
    """The lines of a program file, and in their places those of its parts: other programs, headers in a directory.

    bcc rewrites the operations on maps in the main file alone: so they may stand in its parts.
    """
    with open(os.path.join(bpf_dir, source)) as file:
        lines = file.read().splitlines()
    yield f'#line 1 "{source}"'
    for number, line in enumerate(lines, 1):
        part = _PART.match(line)
        if part:
            yield from whole(part[1], bpf_dir)
            yield f'#line {number + 1} "{source}"'
        else:
            yield line


def layout(kind: Any) -> Any:
    """A ctypes type as the arguments of a numpy dtype: a code, a [code, shape] pair, or a record."""
    if isinstance(kind, type) and issubclass(kind, ctypes.Array):
        return [layout(kind._type_), [kind._length_]]
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure):
        fields = [(field[0], field[1]) for field in kind._fields_]
        return {
            "names": [name for name, _ in fields],
            "formats": [layout(field) for _, field in fields],
            "offsets": [getattr(kind, name).offset for name, _ in fields],
            "itemsize": ctypes.sizeof(kind),
        }
    code = kind._type_
    if code in _NUMPY_CODE:
        return _NUMPY_CODE[code]
    return ("u" if code.isupper() else "i") + str(ctypes.sizeof(kind))


def maps_of(module: Any, lib: Any, decode: Any) -> dict[str, dict[str, Any]]:
    """Every map of a compiled program: its descriptor and the layout of its key and value."""
    # bcc's own bindings leave these two undeclared, and ctypes would cut the pointers to 32 bits.
    lib.bpf_num_tables.restype, lib.bpf_num_tables.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    lib.bpf_table_name.restype, lib.bpf_table_name.argtypes = (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_size_t])
    found: dict[str, dict[str, Any]] = {}
    for index in range(lib.bpf_num_tables(module)):
        name = lib.bpf_table_name(module, index)
        described: dict[str, Any] = {"fd": lib.bpf_table_fd(module, name)}
        for part, describe in (("key", lib.bpf_table_key_desc), ("value", lib.bpf_table_leaf_desc)):
            text = describe(module, name)
            described[part] = layout(decode(json.loads(text))) if text else None
        found[name.decode()] = described
    return found


def build(request: dict[str, Any], bpf_dir: str, keep: Callable[..., None]) -> tuple[dict[str, Any], list[int]]:
    """Compile and load one program file, and keep it; what fails is said in the reply, never raised.

    Raises
    ------
    ImportError, OSError
        If nothing can be compiled here.
    """
    from bcc import BPF, lib

    from pytools.kernel.bpf.cache import Function
    from pytools.kernel.bpf.cache_key import flags
    from pytools.kernel.bpf.syscall import CONNECT4, CONNECT6, UPROBE_MULTI

    # The verifier wants to know it of the first two, links of the last; kernels without such links do not look.
    attach_types = {"connect4": CONNECT4, "connect6": CONNECT6, "uprobe": UPROBE_MULTI}
    defines = [f"-D{name}={value}" for name, value in request["defines"].items()]
    reply, descriptors = nothing(request["source"], "")
    made: list[Function] = []
    with captured_stderr() as said:

        def reason(error: Exception) -> str:
            return explain(said(), str(error))

        try:
            text = "\n".join(whole(request["source"], bpf_dir))
            program = BPF(text=text, cflags=[*flags(bpf_dir), *defines])
        except Exception as error:  # bcc raises bare Exception
            reply["error"] = reason(error)
            return reply, descriptors
        types = {"tc": BPF.SCHED_CLS, "sock_ops": BPF.SOCK_OPS, "sock": BPF.CGROUP_SOCK, "uprobe": BPF.KPROBE}
        types |= dict.fromkeys(("connect4", "connect6"), _SOCK_ADDR)
        for name, kind in request["functions"]:
            try:
                attach = attach_types.get(kind, 0)
                descriptors.append(program.load_func(name, types[kind], attach_type=attach or -1).fd)
                reply["descriptors"].append(f"program:{name}")
                code = program.dump_func(name)
                made.append(Function(f"program:{name}", name, types[kind], code, attach=attach))
            except Exception as error:
                reply["failed"][name] = reason(error)
    for tracepoint, fd in [*program.tracepoint_fds.items(), *program.raw_tracepoint_fds.items()]:
        descriptors.append(fd)
        reply["descriptors"].append(f"tracepoint:{tracepoint.decode()}")
    for event in map(bytes.decode, program.raw_tracepoint_fds):
        code = program.dump_func(f"raw_tracepoint__{event}")
        made.append(Function(f"tracepoint:{event}", event, BPF.RAW_TRACEPOINT, code, event))
    maps: dict[str, int] = {}
    for name, table in maps_of(program.module, lib, BPF._decode_table_type).items():
        maps[name] = table.pop("fd")
        descriptors.append(maps[name])
        reply["descriptors"].append(f"map:{name}")
        reply["maps"][name] = table
    if not reply["failed"] and not program.tracepoint_fds:  # the others have numbers of this boot's
        keep(reply, maps, made)
    _keep.append(program)  # bcc closes everything when the object goes
    return reply, descriptors


_keep: list[Any] = []


def nothing(source: str, why: str) -> tuple[dict[str, Any], list[int]]:
    """The reply of a program of which nothing is loaded."""
    return {"source": source, "error": why, "descriptors": [], "maps": {}, "failed": {}}, []


@contextlib.contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """What is written to descriptor 2 meanwhile: the compiler and the verifier do so from C++."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as log:

        def said() -> str:
            log.seek(0)
            return log.read().decode(errors="replace")

        os.dup2(log.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(before, 2)
            os.close(before)


def explain(log: str, error: str) -> str:
    """The one line of a compiler's or verifier's output that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if "error:" in line:
            return line
    wordy = [line for line in lines if not line.startswith(("processed ", "HINT", ";"))]
    return f"{error}: {wordy[-1]}" if wordy else error


def answer(request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Load a program as it is in the cache, or else compile it."""
    from pytools.kernel.bpf import cache, cache_key

    program, bpf_dir, shelf = request["program"], request["bpf_dir"], cache.Shelf(*request["kept"])
    use_headers(bpf_dir)
    package = request["package"]
    made_from = cache_key.inputs(program, bpf_dir, package)
    found, lacking = shelf.load(made_from), made_from.lacking
    if found is None and request["compile"]:
        sys.path += [os.path.dirname(package)] if package else []
        try:
            found = build(program, bpf_dir, functools.partial(shelf.keep, made_from))
        except (ImportError, OSError) as error:
            lacking = lacking or str(error)
            found = shelf.load(dataclasses.replace(made_from, compiler={}))  # whatever compiled it
    why = f"refused as it is in the cache ({shelf.refused})" if shelf.refused else "not in the cache"
    reply, descriptors = found or nothing(program["source"], why)
    if reply["error"] and lacking and request["compile"]:
        reply["error"] += f", and nothing here compiles it: {lacking}; {_ELSEWHERE}"
    reply.setdefault("entry", made_from.name)
    return reply, descriptors


def main(fd: int) -> None:
    """Serve one request on the socket `fd`."""
    sys.path[0] = os.path.abspath(f"{__file__}/../../../..")  # of a script it is where the script lies
    importlib.import_module("pytools.kernel.bpf.cache")  # with all that it needs, from there

    del sys.path[0]  # another interpreter's packages may be there
    with socket.socket(fileno=fd) as sock:
        size = struct.unpack("<I", exactly(sock, 4))[0]
        request = json.loads(exactly(sock, size))
        reply, descriptors = answer(request)
        body = json.dumps(reply).encode()
        socket.send_fds(sock, [struct.pack("<II", len(body), len(descriptors))], descriptors)
        sock.sendall(body)
        sock.recv(1)  # wait until the parent has them
    os._exit(0)  # bcc's clean-up would detach what was just handed over


def exactly(sock: socket.socket, size: int) -> bytes:
    """Read so many bytes; an EOFError when the other end is gone first."""
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError(f"{len(data)} bytes of {size}, and no more")
        data += part
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]))
