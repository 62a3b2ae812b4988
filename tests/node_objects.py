"""TC programs of Cilium and Calico from object files that their own sources were compiled to, loaded with libbpf.

Nothing of either is in this tree. What their loaders do is done here: the arrays of tail calls are filled, by the tags
in Cilium's BTF and in the order that Calico numbers its programs; the constants of an interface are written into their
sections. The maps are those of the objects, all empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pytools.errors import SwerveError
from pytools.kernel.bpf import syscall

_CILIUM: Final = {"ingress": "cil_from_netdev", "egress": "cil_to_netdev"}
_CALLS, _CONSTANTS, _TAG = "cilium_calls", ".rodata.config", "tail:cilium_calls/"
# Of the interfaces of a node: a preamble has the constants, and calls the first of these; what decides is by itself.
_CALICO: Final = {"ingress": ("from_hep_no_log.o", "ing"), "egress": ("to_hep_no_log.o", "egr")}
_PREAMBLE, _POLICY, _NO_JUMP = "cali_tc_preamble", "calico_tc_allow", 0xFFFFFFFF
_NUMBERED: Final = (
    *("calico_tc_main", _POLICY, "calico_tc_skb_accepted_entrypoint", "calico_tc_skb_send_icmp_replies"),
    *("calico_tc_skb_drop", "calico_tc_host_ct_conflict", "calico_tc_skb_icmp_inner_nat"),
    *("calico_tc_skb_new_flow_entrypoint", "calico_tc_skb_ipv4_frag", "calico_tc_maglev"),
    "calico_tc_skb_send_tcp_rst",
)
_JUMPS, _COUNTERS = 40, "cali_counters6"  # a value for each processor
_SYMBOLS, _LOCAL_FUNCTION, _GLOBAL_FUNCTION = 2, 0x02, 0x12  # SHT_SYMTAB; STB_ and STT_FUNC
_GET_HARDWARE: Final = 0x8927  # SIOCGIFHWADDR
_CLASSIFIER, _MOST_ENTRIES = 3, 16384  # BPF_PROG_TYPE_SCHED_CLS; of a map, to spare memory


class Node:
    """The programs of one interface in the network namespace of the calling thread, until closed: `fds` by direction.

    Parameters
    ----------
    files : Path
        bpf_host.c of Cilium as an object, or a directory with Calico's for host endpoints.
    interface, address : str
        The node's.

    Raises
    ------
    SwerveError
        If libbpf or the kernel refuses them.
    """

    def __init__(self, files: Path, interface: str, address: str) -> None:
        with contextlib.ExitStack() as undo:
            load = _calico if files.is_dir() else _cilium
            self.fds = load(undo, files, interface, address)
            self._loaded = undo.pop_all()

    def close(self) -> None:
        """Close all programs and maps."""
        self._loaded.close()


def _cilium(keep: contextlib.ExitStack, file: Path, interface: str, address: str) -> dict[str, int]:
    index = struct.pack("=I", socket.if_nametoindex(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_HARDWARE, struct.pack("16s24x", interface.encode()))
    constants = {
        "interface_ifindex": index,
        "direct_routing_dev_ifindex": index,
        "interface_mac": answer[18:24],
        "device_mtu": struct.pack("=H", 1500),
        "nat_ipv4_masquerade": socket.inet_aton(address),
    }
    at = _offsets(file)
    values = {at[name]: value for name, value in constants.items() if name in at}
    loaded = keep.enter_context(contextlib.closing(_Object(file, {_CONSTANTS: values})))
    for number, name in _tail_calls(file):
        _put(loaded.maps[_CALLS], struct.pack("=I", number), struct.pack("=I", loaded.programs[name]))
    return {direction: loaded.programs[name] for direction, name in _CILIUM.items()}


def _calico(keep: contextlib.ExitStack, place: Path, interface: str, address: str) -> dict[str, int]:
    """All packets are allowed; the maps are those of a node, so both directions share them."""
    maps: dict[str, int] = {}
    fds: dict[str, int] = {}
    index = struct.pack("=I", socket.if_nametoindex(interface))
    for hook, (direction, (main, short)) in enumerate(_CALICO.items()):
        preamble = place / f"tc_preamble_{direction}.o"
        at = _members(preamble, "cali_tc_global_data")
        jumps = [number if number < len(_NUMBERED) else _NO_JUMP for number in range(_JUMPS)]
        constants = {
            "host_ip": socket.inet_aton(address),
            "intf_ip": socket.inet_aton(address),
            "vxlan_port": struct.pack("=H", 4789),
            "iface_name": interface.encode(),
            "log_filter_jmp": struct.pack("=I", _NO_JUMP),
            "jumps": struct.pack(f"={_JUMPS}I", *jumps),
        }
        values = {at[name]: value for name, value in constants.items()}
        values[_members(preamble, "cali_tc_preamble_globals")["v6"] + at["jumps"]] = b"\xff" * 4 * _JUMPS
        programs: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for file in (place / main, place / f"policy_default_{direction}.o", preamble):
            loaded = keep.enter_context(contextlib.closing(_Object(file, {".rodata": values}, maps)))
            maps |= {name: fd for name, fd in loaded.maps.items() if "." not in name}
            programs |= loaded.programs
            sizes |= loaded.sizes
        for number, name in enumerate(_NUMBERED):
            if name in programs:
                array = maps[f"cali_{'jump' if name == _POLICY else 'progs'}_{short}2"]
                _put(array, struct.pack("=I", number), struct.pack("=I", programs[name]))
        _put(maps[_COUNTERS], index + struct.pack("=I", hook), bytes(sizes[_COUNTERS]))  # else nothing passes
        fds[direction] = programs[_PREAMBLE]
    return fds


class _Object:
    """The programs and maps of an object file, until closed.

    Parameters
    ----------
    values : mapping
        By the end of a section's name: what to write into it, and where.
    shared : mapping
        Maps by name, in the place of the object's own.
    """

    def __init__(
        self, file: Path, values: Mapping[str, Mapping[int, bytes]], shared: Mapping[str, int] | None = None
    ) -> None:
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
            name = self._name("map", each)
            if shared and name in shared:
                self._lib.bpf_map__reuse_fd(each, shared[name])
                continue
            self._lib.bpf_map__set_max_entries(each, min(self._lib.bpf_map__max_entries(each), _MOST_ENTRIES))
            for section, wanted in values.items():
                if name.endswith(section):
                    self._write(each, wanted)
        if self._lib.bpf_object__load(self._object):
            raise SwerveError(f"the kernel refuses the programs of {file}", "what libbpf prints says why")
        maps = {self._name("map", each): each for each in self._each("map")}
        self.maps = {name: self._lib.bpf_map__fd(each) for name, each in maps.items()}
        processors = self._lib.libbpf_num_possible_cpus()
        self.sizes = {name: processors * self._lib.bpf_map__value_size(each) for name, each in maps.items()}
        self.programs = {self._name("program", each): self._lib.bpf_program__fd(each) for each in self._each("program")}

    def _each(self, kind: str) -> Iterator[ctypes.c_void_p]:
        after: ctypes.c_void_p | None = None
        while found := getattr(self._lib, f"bpf_object__next_{kind}")(self._object, after):
            after = ctypes.c_void_p(found)
            yield after

    def _name(self, kind: str, each: ctypes.c_void_p) -> str:
        name: bytes = getattr(self._lib, f"bpf_{kind}__name")(each)
        return name.decode()

    def _write(self, section: ctypes.c_void_p, values: Mapping[int, bytes]) -> None:
        start = self._lib.bpf_map__initial_value(section, ctypes.byref(ctypes.c_size_t()))
        for offset, value in values.items():
            ctypes.memmove(start + offset, value, len(value))

    def close(self) -> None:
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


def _types(file: Path) -> list[dict[str, Any]]:
    """What the object's BTF describes."""
    shown = subprocess.run(["bpftool", "-j", "btf", "dump", "file", file], stdout=subprocess.PIPE, check=True).stdout
    found: list[dict[str, Any]] = json.loads(shown)["types"]
    return found


def _tail_calls(file: Path) -> Iterator[tuple[int, str]]:
    """Number and program of each."""
    types = _types(file)
    names = {each["id"]: each["name"] for each in types}
    for each in types:
        if each["kind"] == "DECL_TAG" and each["name"].startswith(_TAG):
            yield int(each["name"].removeprefix(_TAG)), names[each["type_id"]]


def _members(file: Path, name: str) -> dict[str, int]:
    """Where each member of a structure begins."""
    [found] = [each for each in _types(file) if each["kind"] == "STRUCT" and each["name"] == name]
    return {each["name"]: each["bits_offset"] // 8 for each in found["members"]}


def _offsets(file: Path) -> dict[str, int]:
    """Where each constant lies in its section."""
    shown = subprocess.run(["readelf", "-sW", file], stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = [line.split() for line in shown.splitlines() if "__config_" in line]
    return {row[7].removeprefix("__config_"): int(row[1], 16) for row in rows if row[3] == "OBJECT"}


def _put(map_fd: int, key: bytes, value: bytes) -> None:
    keys, values = ctypes.create_string_buffer(key), ctypes.create_string_buffer(value)
    where = struct.pack("<I4xQQQ", map_fd, syscall.address(keys), syscall.address(values), 0)
    syscall.bpf(syscall.MAP_UPDATE_ELEM, where)
