"""The kernel edge: compile in a child, descriptors, maps, attachments."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from packet_runs import PacketRuns
from support import ROOT, SWERVE, mentions, require

from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.kernel.bpf import attach, cache_key, compiler_client, loader, syscall
from pytools.kernel.bpf import cache as compiled
from pytools.sources import programs
from steering.commands import cache as cache_commands

MAPS = """
struct key { u32 a; u16 b; u16 pad; };
struct value { u64 n; u8 name[6]; u16 pad; };
BPF_HASH(table, struct key, struct value, 10000);
BPF_PERCPU_ARRAY(percpu, u64, 3);
int nothing(struct __sk_buff *skb) { u32 i = 1; percpu.atomic_increment(i); return -1; }
"""


EMPTY = loader.Program("empty.c", ("empty",))


def program(directory: Path, name: str, text: str, *functions: str) -> loader.Program:
    (directory / name).write_text(text)
    return loader.Program(str(directory / name), functions)


@pytest.mark.guest(thorough=True)  # compiles in the guest
def test_a_program_that_fails_is_named_and_the_rest_go_on(tmp_path: Path) -> None:
    programs = [
        program(tmp_path, "syntax.c", "int broken(struct __sk_buff *skb) { return nosuch; }", "broken"),
        program(
            tmp_path,
            "verifier.c",
            "int unsafe(struct __sk_buff *skb) { return *(int *)(long)skb->data; }\n"
            "int safe(struct __sk_buff *skb) { return 0; }",
            "unsafe",
            "safe",
        ),
        loader.Program("probe.c", ("probe_egress",)),
    ]
    with loader.load(programs) as loaded:
        assert set(loaded.programs) == {"safe", "probe_egress"}
        assert loaded.failed[str(tmp_path / "syntax.c")].endswith("use of undeclared identifier 'nosuch'")
        assert "outside of the packet" in loaded.failed["unsafe"]


really_call = syscall.call


def without_batches(command: int, buffer: ctypes.Array[ctypes.c_char], size: int) -> int:
    """As a kernel that has none for this type of map."""
    if command == syscall.MAP_LOOKUP_BATCH:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return really_call(command, buffer, size)


@pytest.mark.guest
def test_maps_are_arrays_of_the_compiled_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader.load([program(tmp_path, "maps.c", MAPS, "nothing")]) as loaded:
        table = loaded.map("table")
        assert table.key.names == ("a", "b", "pad")
        assert table.value.itemsize == 16
        assert table.value["name"].shape == (6,)
        for a in range(5000):
            key, value = np.zeros((), table.key), np.zeros((), table.value)
            key["a"], value["n"] = a, a * a
            table.update(key, value)
        keys, values = table.read()
        assert sorted(keys["a"].tolist()) == list(range(5000))
        assert (values["n"] == keys["a"].astype(np.uint64) ** 2).all()
        with monkeypatch.context() as patched:
            patched.setattr(syscall, "call", without_batches)
            assert (loaded.map("table").read()[0]["a"] == keys["a"]).all(), "kernels without batches read the same"
        assert table.delete(keys[0])
        assert not table.delete(keys[0])
        found, looked_up = table.lookup_many(keys[:300])
        assert found.tolist() == [False, *[True] * 299]
        assert looked_up["n"].tolist() == [0, *values["n"][1:300].tolist()]
        assert [len(each) for each in table.lookup_many(keys[:0])] == [0, 0]
        assert len(table.read()[0]) == 4999
        PacketRuns().run(loaded.programs["nothing"], bytes(64), repeat=11)
        assert loaded.map("percpu").read_percpu_sum().tolist() == [0, 11, 0]


def test_there_is_room_for_as_many_entries_as_a_map_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(command: int, buffer: ctypes.Array[ctypes.c_char], size: int) -> int:
        if command == syscall.MAP_LOOKUP_BATCH:
            asked.append(int.from_bytes(buffer.raw[32:36], sys.byteorder))
        return really_call(command, buffer, size)

    with loader.load([program(tmp_path, "maps.c", MAPS, "nothing")]) as loaded:
        table = loaded.map("table")
        for a in range(100):
            key = np.zeros((), table.key)
            key["a"] = a
            table.update(key, np.zeros((), table.value))
        monkeypatch.setattr(syscall, "call", counted)
        assert sorted(table.read()[0]["a"].tolist()) == list(range(100))
        assert asked == [16 << turn for turn in range(len(asked))], "twice as much each time, until all were read"
        asked.clear()
        assert sorted(table.read()[0]["a"].tolist()) == list(range(100))
        assert asked == [200], "all at once"


def test_a_full_map_says_so(tmp_path: Path) -> None:
    text = "BPF_HASH(tiny, u32, u32, 2);\nint f(struct __sk_buff *skb) { u32 k = 0; tiny.lookup(&k); return 0; }"
    with loader.load([program(tmp_path, "tiny.c", text, "f")]) as loaded:
        tiny = loaded.map("tiny")
        tiny.update(1, 1)
        tiny.update(2, 1)
        with pytest.raises(SwerveError, match=r"tiny.*full"):
            tiny.update(3, 1)


def test_nothing_stays_open_after_close(tmp_path: Path) -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    loader.load([loader.Program("probe.c", ("probe_egress",))]).close()
    before = descriptors()
    with loader.load([loader.Program("probe.c", ("probe_egress",)), loader.Program("nosuch.c", ("f",))]) as loaded:
        loaded.ring("probes", "probe")
        assert "nosuch.c" in loaded.failed
    assert descriptors() == before


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled programs: the directory of this user's entries, once there is one."""
    monkeypatch.setenv("SWERVE_CACHE_DIR", str(tmp_path))
    return tmp_path / f"compiled.{os.geteuid()}"


def ours() -> list[loader.Program]:
    """Programs of every kind that there is: TC, socket callbacks, tracepoints; every kind of map, a ring."""
    callbacks = {"tcp_callbacks": "sock_ops"}
    tcp = loader.Program("tcp.c", ("tcp_egress", "tcp_callbacks"), {"SWERVE_TCP_CONGESTION": 1}, callbacks)
    return [loader.Program("probe.c", ("probe_egress",)), tcp, loader.Program("rdma.c", ())]


def described(loaded: loader.Loaded) -> dict[str, object]:
    """What was loaded, as the kernel and we describe it."""
    there = [loaded.map(name) for name in loaded.map_names]
    maps = {each.name: (syscall.MapInfo(each.fd).made_with, each.key, each.value) for each in there}
    return {"maps": maps, "programs": set(loaded.programs), "at": set(loaded.tracepoints), "failed": loaded.failed}


def type_and_tag(fd: int) -> tuple[bytes, bytes]:
    """A program's type, and the kernel's digest of its instructions, maps left out."""
    raw = syscall.object_info(fd, syscall.PROG_INFO_BYTES)
    return raw[:4], raw[8:16]


@pytest.mark.guest(thorough=True)
def test_what_was_compiled_once_is_loaded_the_same(cache: Path) -> None:
    with loader.load(ours()) as first, loader.load([*ours(), loader.Program("nosuch.c", ())]) as again:
        assert described(first) == {**described(again), "failed": {}}
        assert first.failed == {} and set(again.failed) == {"nosuch.c"}
        assert described(first)["at"] == {"tcp_cong_state_set", "inet_sock_set_state"}
        for name, fd in first.programs.items():
            assert type_and_tag(fd) == type_and_tag(again.programs[name]), name


def test_the_compiler_is_not_asked_twice(cache: Path) -> None:
    loader.load([EMPTY]).close()
    (entry,) = cache.iterdir()
    entry.write_text(entry.read_text().replace('"program:empty"', '"program:as_it_was_kept"'))
    with loader.load([EMPTY]) as kept, loader.load([EMPTY], cache="avoid") as anew:
        assert (set(kept.programs), set(anew.programs)) == ({"as_it_was_kept"}, {"empty"})
    other = dataclasses.replace(EMPTY, defines={"SWERVE_PROBE_PORT": 8620})
    with loader.load([other]) as loaded:
        assert set(loaded.programs) == {"empty"} and len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["torn", "refused", "rubbish", "writable", "another's", "a link", "open"])
def test_an_entry_that_is_not_as_it_should_be_is_not_used(cache: Path, damage: str) -> None:
    loader.load([EMPTY]).close()
    (entry,) = cache.iterdir()
    whole = entry.read_text()
    entry.write_text(whole.replace('"program:empty"', '"program:as_it_was_kept"'))
    if damage == "torn":
        entry.write_text(whole[: len(whole) // 2])
    elif damage == "refused":
        entry.write_text(whole.replace('"empty", 3, ""', '"empty", 13, ""'))  # another type of program
    elif damage == "rubbish":  # seven bytes are no instruction
        entry.write_text(re.sub(r'"[^"]*"(?=\]\]\})', '"AAAAAAAAAA=="', whole))
        assert "AAAAAAAAAA==" in entry.read_text()
    elif damage == "writable":
        entry.chmod(0o620)
    elif damage == "another's":
        os.chown(entry, 4711, 4711)
    elif damage == "a link":
        entry.symlink_to(entry.rename(cache.parent / "elsewhere"))
    else:
        cache.chmod(0o777)
    with loader.load([EMPTY]) as loaded:
        assert set(loaded.programs) == {"empty"} and loaded.failed == {}
    if damage != "open":
        assert entry.read_text() == whole and entry.stat().st_uid == os.geteuid(), "it is kept anew"


def test_without_a_place_nothing_is_kept(cache: Path) -> None:
    cache.parent.joinpath("file").touch()
    os.environ["SWERVE_CACHE_DIR"] = str(cache.parent / "file")  # put back by the fixture
    with loader.load([EMPTY]) as loaded:
        assert set(loaded.programs) == {"empty"} and loaded.failed == {}


def test_only_so_many_entries_are_kept(cache: Path) -> None:
    cache.mkdir(0o700)
    for number in range(70):
        (cache / f"{number}").touch()
        os.utime(cache / f"{number}", (number, number))
    loader.load([EMPTY]).close()
    left = {each.name for each in cache.iterdir()}
    assert len(left) == compiled.MOST_ENTRIES and {"69"} < left and "6" not in left


# ---- on a host without a compiler ----

LOAD = """
import json
from pytools.config import AgentConfig
from pytools.kernel.bpf import loader
from pytools.sources import programs
with loader.load(programs.all_of(AgentConfig("", []))) as loaded:
    print(json.dumps([sorted(loaded.programs), sorted(loaded.tracepoints), sorted(loaded.map_names), loaded.failed]))
"""
AWAY = {
    "nothing is installed": "mount -t tmpfs none {package}; mount -t tmpfs none /usr/include; {libraries}",
    "LLVM cannot be loaded": "{libraries}",
}


def without_compiler(how: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command where the compiler's files are not those that are installed: in a mount namespace of its own."""
    found = cache_key.inputs(EMPTY.request, str(loader.bpf_dir()), compiler_client.bcc_package())
    places = [str(cache_key._library(name)) for name in found.compiler["libraries"]]
    libraries = "; ".join(f"mount --bind /dev/null {place}" for place in places if "libbcc" not in place)
    script = AWAY[how].format(package=compiler_client.bcc_package(), libraries=libraries)
    inside = ["unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh", *map(str, command)]
    return subprocess.run(inside, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_agent_loads_what_was_imported_where_nothing_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("bcc", "tracefs")
    wanted = programs.all_of(AgentConfig("", []))
    monkeypatch.setattr(cache_commands, "_wanted", lambda _: wanted)  # not for all lesser kernels: that takes long
    archive = tmp_path / "programs.tar"
    exported = CliRunner().invoke(cache_commands.cache, ["export", str(archive)])
    assert exported.exit_code == 0, exported.output
    with loader.load(wanted) as here:
        expected = [sorted(here.programs), sorted(here.tracepoints), sorted(here.map_names), {}]
        assert here.failed == {}

    monkeypatch.setenv("SWERVE_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    config = tmp_path / "agent.yaml"
    config.write_text("host: h1\npeers: []\n")
    refused = without_compiler("nothing is installed", *SWERVE, "agent", "--config", config)
    assert refused.returncode == 5, refused.stderr
    assert re.search(r"probe\.c: not in the cache.*`swerve cache export` on a host with a compiler", refused.stderr)
    imported = without_compiler("nothing is installed", *SWERVE, "cache", "import", archive)
    assert mentions(imported.stdout, f"{len(wanted)} imported", "0 already", "0 refused"), imported.stderr
    for how in AWAY:
        loaded = without_compiler(how, sys.executable, "-c", LOAD)
        assert json.loads(loaded.stdout) == expected, loaded.stderr
    doctor = without_compiler("nothing is installed", *SWERVE, "doctor", "-j", "--config", config)
    found = {each["name"]: each["present"] for each in json.loads(doctor.stdout)["results"]}
    assert (found["compiler"], found["program cache"], found["our programs"]) == (False, True, True)


def test_the_parent_never_loads_llvm() -> None:
    text = (
        "from pytools.kernel.bpf import loader\n"
        "loaded = loader.load([loader.Program('probe.c', ('probe_egress',))])\n"
        "assert loaded.programs and 'libbcc' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


def filters(namespace: str, interface: str) -> str:
    from support import run

    return (
        "".join(
            run(["tc", "-n", namespace, "filter", "show", "dev", interface, way]).stdout
            for way in ("ingress", "egress")
        )
        + run(["tc", "-n", namespace, "qdisc", "show", "dev", interface]).stdout
    )


@pytest.mark.guest(every=2)
@pytest.mark.parametrize("force_clsact", [False, True], ids=["best", "clsact"])
def test_attached_programs_see_packets_and_go_without_trace(veth_pair: tuple[str, str], force_clsact: bool) -> None:
    from support import run

    namespace, _ = veth_pair
    untouched = filters(namespace, "v0")
    with netns.inside(namespace), loader.load([loader.Program("probe.c", ("probe_egress", "probe_ingress"))]) as loaded:
        attachments = [
            attach.attach_tc(loaded.programs["probe_egress"], "v0", "egress", force_clsact),
            attach.attach_tc(loaded.programs["probe_ingress"], "v0", "ingress", force_clsact),
        ]
        fd = syscall.enable_stats()
        run(["ip", "netns", "exec", namespace, "ping", "-c", "3", "-i", "0.01", "10.77.0.2"])
        os.close(fd)
        assert all(syscall.program_run_time(each)[1] >= 3 for each in loaded.programs.values())
        if force_clsact:
            assert "swerve" in filters(namespace, "v0")
        for attachment in attachments:
            attachment.close()
            attachment.close()
    assert filters(namespace, "v0") == untouched


@pytest.mark.guest
def test_clean_removes_what_a_crash_left_and_nothing_else(veth_pair: tuple[str, str]) -> None:
    from support import run

    namespace, _ = veth_pair
    with netns.inside(namespace), loader.load([loader.Program("empty.c", ("empty",))]) as loaded:
        run(["tc", "-n", namespace, "qdisc", "add", "dev", "v0", "clsact"])
        match = ["u32", "match", "u32", "0", "0", "flowid", "1:1"]
        run(["tc", "-n", namespace, "filter", "add", "dev", "v0", "egress", "pref", "7", *match])
        others = filters(namespace, "v0")
        attach.attach_tc(loaded.programs["empty"], "v0", "egress", force_clsact=True)
        attach.attach_tc(loaded.programs["empty"], "v0", "egress", force_clsact=True)
        assert filters(namespace, "v0").count("swerve") == 2
        assert len(attach.clean()) == 2
        assert filters(namespace, "v0") == others
        assert attach.clean() == []


def test_an_interface_that_went_first_is_no_error(veth_pair: tuple[str, str]) -> None:
    from support import run

    namespace, _ = veth_pair
    with netns.inside(namespace), loader.load([loader.Program("empty.c", ("empty",))]) as loaded:
        attachments = [
            attach.attach_tc(loaded.programs["empty"], "v0", "egress"),
            attach.attach_tc(loaded.programs["empty"], "v0", "ingress", force_clsact=True),
        ]
        run(["ip", "-n", namespace, "link", "delete", "v0"])
        for attachment in attachments:
            attachment.close()
        with pytest.raises(SwerveError, match="no interface v0"):
            attach.attach_tc(loaded.programs["empty"], "v0", "egress")
