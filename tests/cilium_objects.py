"""TC programs of Cilium from an object file that its own sources were compiled to, loaded with libbpf.

Nothing of Cilium is in this tree. Its loader fills the array of tail calls by the tags in the object's BTF, and writes
the constants of an interface into `.rodata.config`: so does this. The maps are those of the object, all empty.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pytools.errors import SwerveError
from pytools.kernel.bpf import syscall

ENTRIES: Final = {"ingress": "cil_from_netdev", "egress": "cil_to_netdev"}
_CALLS, _CONSTANTS, _TAG = "cilium_calls", ".rodata.config", "tail:cilium_calls/"
_SYMBOLS, _LOCAL_FUNCTION, _GLOBAL_FUNCTION = 2, 0x02, 0x12  # SHT_SYMTAB; STB_ and STT_FUNC
_GET_HARDWARE: Final = 0x8927  # SIOCGIFHWADDR
_CLASSIFIER, _MOST_ENTRIES = 3, 16384  # BPF_PROG_TYPE_SCHED_CLS; of a map, to spare memory


def constants(interface: str, address: str) -> dict[str, bytes]:
    """Of an interface of the calling thread's network namespace, whose address is that of the node."""
    index = struct.pack("=I", socket.if_nametoindex(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_HARDWARE, struct.pack("16s24x", interface.encode()))
    return {
        "interface_ifindex": index,
        "direct_routing_dev_ifindex": index,
        "interface_mac": answer[18:24],
        "device_mtu": struct.pack("=H", 1500),
        "nat_ipv4_masquerade": socket.inet_aton(address),
    }


class Host:
    """The programs of one interface, until closed: `fds` by direction.

    Parameters
    ----------
    file : Path
        bpf_host.c as an object.
    constants : mapping
        Values by name, without the prefix; those that the object does not have are left out.

    Raises
    ------
    SwerveError
        If libbpf or the kernel refuses it.
    """

    def __init__(self, file: Path, constants: Mapping[str, bytes]) -> None:
        self._lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
        for name in ("open_mem", "next_program", "next_map"):
            getattr(self._lib, f"bpf_object__{name}").restype = ctypes.c_void_p
        for name in ("bpf_program__name", "bpf_map__name"):
            getattr(self._lib, name).restype = ctypes.c_char_p
        self._lib.bpf_map__initial_value.restype = ctypes.c_void_p
        # Unknown fields of maps are ignored: how Cilium pins them is one.
        content, options = _for_libbpf(file.read_bytes()), struct.pack("@NP?0N", 24, 0, True)
        self._lib.bpf_object__open_mem.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
        self._object = ctypes.c_void_p(self._lib.bpf_object__open_mem(content, len(content), options))
        if not self._object.value:
            raise SwerveError(f"libbpf cannot read {file}", "compile it with -g --target=bpf")
        for each in self._each("program"):
            self._lib.bpf_program__set_type(each, _CLASSIFIER)
        for each in self._each("map"):
            self._lib.bpf_map__set_max_entries(each, min(self._lib.bpf_map__max_entries(each), _MOST_ENTRIES))
            if self._name("map", each).endswith(_CONSTANTS):
                self._write(each, _offsets(file), constants)
        if self._lib.bpf_object__load(self._object):
            raise SwerveError(f"the kernel refuses the programs of {file}", "what libbpf prints says why")
        maps = {self._name("map", each): self._lib.bpf_map__fd(each) for each in self._each("map")}
        programs = {self._name("program", each): self._lib.bpf_program__fd(each) for each in self._each("program")}
        self.fds = {direction: programs[name] for direction, name in ENTRIES.items()}
        for number, name in _tail_calls(file):
            _put(maps[_CALLS], struct.pack("<I", number), struct.pack("<I", programs[name]))

    def _each(self, kind: str) -> Iterator[ctypes.c_void_p]:
        after: ctypes.c_void_p | None = None
        while found := getattr(self._lib, f"bpf_object__next_{kind}")(self._object, after):
            after = ctypes.c_void_p(found)
            yield after

    def _name(self, kind: str, each: ctypes.c_void_p) -> str:
        name: bytes = getattr(self._lib, f"bpf_{kind}__name")(each)
        return name.decode()

    def _write(self, constants: ctypes.c_void_p, offsets: Mapping[str, int], values: Mapping[str, bytes]) -> None:
        size = ctypes.c_size_t()
        start = self._lib.bpf_map__initial_value(constants, ctypes.byref(size))
        for name, value in values.items():
            if name in offsets:
                ctypes.memmove(start + offsets[name], value, len(value))

    def close(self) -> None:
        """Close all programs and maps."""
        self._lib.bpf_object__close(self._object)


def _for_libbpf(elf: bytes) -> bytes:
    """libbpf takes no programs that are static, as Cilium's tail calls are, nor its ways to pin maps."""
    content = bytearray(elf.replace(b"\0pinning\0", b"\0unknown\0"))
    (sections,), (size, count) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HH", elf, 0x3A)
    for each in range(count):
        kind, start, length = struct.unpack_from("<4xI16xQQ", elf, sections + each * size)
        for symbol in range(start, start + length, 24) if kind == _SYMBOLS else ():
            if content[symbol + 4] == _LOCAL_FUNCTION:
                content[symbol + 4] = _GLOBAL_FUNCTION
    return bytes(content)


def _tail_calls(file: Path) -> Iterator[tuple[int, str]]:
    """Number and program of each."""
    shown = subprocess.run(["bpftool", "-j", "btf", "dump", "file", file], stdout=subprocess.PIPE, check=True).stdout
    types = json.loads(shown)["types"]
    names = {each["id"]: each["name"] for each in types}
    for each in types:
        if each["kind"] == "DECL_TAG" and each["name"].startswith(_TAG):
            yield int(each["name"].removeprefix(_TAG)), names[each["type_id"]]


def _offsets(file: Path) -> dict[str, int]:
    """Where each constant lies in its section."""
    shown = subprocess.run(["readelf", "-sW", file], stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = [line.split() for line in shown.splitlines() if "__config_" in line]
    return {row[7].removeprefix("__config_"): int(row[1], 16) for row in rows if row[3] == "OBJECT"}


def _put(map_fd: int, key: bytes, value: bytes) -> None:
    keys, values = ctypes.create_string_buffer(key), ctypes.create_string_buffer(value)
    where = struct.pack("<I4xQQQ", map_fd, syscall.address(keys), syscall.address(values), 0)
    syscall.bpf(syscall.MAP_UPDATE_ELEM, where)
