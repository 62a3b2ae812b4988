"""Compiled programs in files: what their names depend on, their archive, and who may have written them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import support
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pytools import cli
from pytools.config import AgentConfig
from pytools.errors import RefusedError, SwerveError, UsageError
from pytools.kernel.bpf import cache, cache_archive, cache_key
from pytools.kernel.bpf.compiler_client import bpf_dir
from pytools.sources import programs
from steering.cli import root

# ---- the name of an entry ----

PROGRAM = {"source": "prog.c", "defines": {"PORT": 862}, "functions": [["f", "tc"]]}


class Host:
    """A host with sources, headers and a compiler of its own, all made up."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bpf, self.system, package, libraries, how = (
            top / each for each in ("bpf", "usr/include", "bcc", "lib", "how")
        )
        self.package = str(package)
        self.write(self.bpf / "prog.c", '#include "lib/part.h"\n#include <linux/udp.h>\nint f;\n')
        self.write(self.bpf / "lib/part.h", "int part;\n")
        self.write(self.bpf / "lib/other.h", "int other;\n")
        self.write(self.bpf / "include/linux/kconfig.h", "#define CONFIG 1\n")
        for name in ("version", "ip", "bpf_common"):
            self.write(self.system / f"linux/{name}.h", f"int {name};\n")
        self.write(self.system / "linux/types.h", "#if 0\n#  include <asm/types.h>\n#endif\n")
        self.write(self.system / "linux/udp.h", "#include <linux/types.h>\n")
        self.write(self.system / f"{cache_key._multiarch()}/asm/types.h", "int u32;\n")
        self.write(package / "libbcc.py", "")
        self.write(
            libraries / "libbcc.so.0",
            "\0libm.so.6\0libclang-cpp.so.14\0libLLVM-14.so.1\0#include <linux/bpf_common.h>\n",
        )
        for name in ("libclang-cpp.so.14", "libLLVM-14.so.1", "libLLVM-15.so.1"):
            self.write(libraries / name, name)
        for name in cache_key._HOW:
            self.write(how / name, "")
        monkeypatch.setattr(cache_key, "SYSTEM", self.system)
        monkeypatch.setattr(cache_key, "_HERE", how)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))

    def write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def inputs(self, **changes: object) -> cache_key.Inputs:
        return cache_key.inputs({**PROGRAM, **changes}, str(self.bpf), self.package)

    @property
    def name(self) -> str:
        return self.inputs().name


def test_the_same_content_has_the_same_name_on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = cache_key.flags("bpf")
    monkeypatch.setattr(cache_key, "flags", lambda _: flags)  # of the real /usr/include, as on real hosts
    first = Host(tmp_path / "one", monkeypatch).name
    other = Host(tmp_path / "two", monkeypatch)
    words = ("Linux", "elsewhere", "6.1.0-99-amd64", "#1 SMP", os.uname().machine)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(words))
    for each in (tmp_path / "two").rglob("*"):
        os.utime(each, (1, 1))
    assert other.name == first
    assert len(first) == 2 * cache_key.LETTERS + 1


@pytest.mark.parametrize(
    ("changed", "compiler_only"),
    [
        ("bpf/prog.c", False),
        ("bpf/lib/part.h", False),
        ("bpf/include/linux/kconfig.h", False),
        ("how/compiler.py", False),
        ("usr/include/linux/udp.h", True),
        ("usr/include/linux/types.h", True),
        (f"usr/include/{cache_key._multiarch()}/asm/types.h", True),
        ("usr/include/linux/version.h", True),
        ("usr/include/linux/bpf_common.h", True),
        ("bcc/libbcc.py", True),
        ("lib/libbcc.so.0", True),
        ("lib/libLLVM-14.so.1", True),
        ("lib/libclang-cpp.so.14", True),
    ],
)
def test_each_file_that_goes_in_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, compiler_only: bool
) -> None:
    host = Host(tmp_path, monkeypatch)
    before = host.inputs()
    with (tmp_path / changed).open("a") as file:
        file.write("\n")
    after = host.inputs()
    assert after.name != before.name
    assert (after.prefix == before.prefix) == compiler_only


@pytest.mark.parametrize("changed", ["bpf/lib/other.h", "usr/include/linux/ip.h", "lib/libLLVM-15.so.1"])
def test_what_does_not_go_in_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    host = Host(tmp_path, monkeypatch)
    before = host.name
    (tmp_path / changed).write_text("int changed;\n")
    assert host.name == before


def test_what_is_asked_for_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, monkeypatch)
    changes: list[dict[str, object]] = [
        {},
        {"defines": {"PORT": 863}},
        {"defines": {}},
        {"functions": [["f", "sock"]]},
        {"functions": [["f", "tc"], ["g", "tc"]]},
        {"source": "lib/part.h"},
    ]
    names = [host.inputs(**each).name for each in changes]
    monkeypatch.setattr(cache_key, "machine", lambda: "linux-aarch64")
    names.append(host.name)
    flags = [*cache_key.flags("bpf"), "-O3"]
    monkeypatch.setattr(cache_key, "flags", lambda _: flags)
    names.append(host.name)
    assert len(set(names)) == len(names)
    ordered = [host.inputs(defines=each).name for each in ({"A": 1, "B": 2}, {"B": 2, "A": 1})]
    assert len(set(ordered)) == 1


@pytest.mark.parametrize("lacks", ["bcc", "lib/libbcc.so.0", "lib/libLLVM-14.so.1", "usr/include/linux/types.h"])
def test_a_host_that_cannot_compile_looks_for_what_any_compiler_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    host = Host(tmp_path, monkeypatch)
    able = host.inputs()
    if lacks == "bcc":
        host.package = ""
    else:
        (tmp_path / lacks).unlink()
    monkeypatch.setattr(cache_key, "_multiarch", lambda: "nowhere")  # this machine may have it
    unable = host.inputs()
    assert unable.name == "" and unable.prefix == able.prefix
    assert Path(lacks).name in unable.lacking


def test_a_program_from_elsewhere_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, monkeypatch)
    mine = host.inputs(source=str(tmp_path / "mine.c"))
    assert mine == cache_key.Inputs({}, {}) and (mine.prefix, mine.name) == ("", "")


@pytest.mark.parametrize("source", [each.name for each in sorted(bpf_dir().glob("*.c"))])
def test_no_header_is_missed(source: str) -> None:
    support.require("gcc")
    ours = bpf_dir().resolve()
    places = [f"-I{ours / 'include'}", f"-I{ours / 'include/uapi'}", f"-I{ours}"]
    command = ["gcc", "-M", "-MG", "-undef", "-nostdinc", *places, "-I/usr/include"]
    command += [f"-I/usr/include/{cache_key._multiarch()}", "-include", "linux/kconfig.h", str(ours / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    read = {Path(each) for each in done.stdout.replace("\\\n", " ").split()[1:]}
    files, named = cache_key._ours(source, ours)
    known = {ours / each for each in files} | {Path("/usr/include") / each for each in cache_key._system_headers(named)}
    assert {each for each in read if each.exists() and each.name != "stdc-predef.h"} - known == set()
    assert len(read & known) > 1


def test_what_the_kernel_can_do_makes_other_programs() -> None:
    most = programs.Kernel(True, True, True, True)
    lesser = list(most.lesser())
    assert len(lesser) == 16 and most in lesser and programs.Kernel(False, False, False, False) in lesser
    assert list(lesser[0].lesser()) == [lesser[0]]
    sets = [programs.all_of(AgentConfig("", []), each) for each in lesser]
    of_tcp = {json.dumps(each[1].request, sort_keys=True) for each in sets}
    of_drops = {json.dumps(each[2].request) for each in sets if len(each) > 2}
    assert (len(of_tcp), len(of_drops)) == (4, 2)


# ---- entries, and the archive of them ----


def entry(source: str = "prog.c", machine: str = "", **changes: object) -> tuple[str, bytes]:
    """An entry as cache.py writes it, and its name."""
    program = {**PROGRAM, "source": source, "machine": machine or cache_key.machine(), "sources": "0" * 64}
    compiler = {"bcc": "1", "libraries": {"libbcc.so.0": "2"}, "headers": "3", "flags": ["-I/usr/include"]}
    reply = {"source": source, "error": "", "descriptors": ["program:f"], "maps": {}, "failed": {}}
    body = {
        "made_from": {"program": program, "compiler": compiler},
        "reply": reply,
        "maps": [["table", 1, 4, 8, 1, 0]],
        "functions": [["program:f", "f", 3, 0, "", "twAAAAAAAACVAAAAAAAAAA=="]],
    }
    return cache_key.Inputs(program, compiler).name, json.dumps(body | changes).encode()


ENTRIES = dict([entry("probe.c"), entry("tcp.c"), entry("drops.c")])
PACKED = cache_archive.packed(ENTRIES)
NAME = next(iter(sorted(ENTRIES)))


def archive(members: Mapping[str, bytes], kinds: Mapping[str, bytes] | None = None) -> bytes:
    """A tar archive of these members, made by the standard library."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as made:
        for name, body in members.items():
            about = tarfile.TarInfo(name)
            about.size, about.type = len(body), (kinds or {}).get(name, tarfile.REGTYPE)
            about.linkname = "/etc/passwd" if about.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            made.addfile(about, io.BytesIO(body))
    return out.getvalue()


def members(**changes: bytes | None) -> dict[str, bytes]:
    """What is in `PACKED`; None leaves one out."""
    with tarfile.open(fileobj=io.BytesIO(PACKED)) as packed:
        found = {each.name: (packed.extractfile(each) or io.BytesIO()).read() for each in packed}
    found |= {name: body for name, body in changes.items() if body is not None}
    return {name: body for name, body in found.items() if changes.get(name, b"") is not None}


def manifest(change: Callable[[dict[str, object]], object]) -> bytes:
    said = json.loads(members()["manifest.json"])
    change(said)
    return json.dumps(said).encode()


def listed(body: bytes, **rest: object) -> dict[str, bytes]:
    """Members of which one has another content, and the manifest says so (and the rest)."""

    def change(said: dict[str, object]) -> None:
        objects = said["objects"]
        assert isinstance(objects, list)
        (one,) = [each for each in objects if each["name"] == NAME]
        one |= {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest(), **rest}

    return {**members(), f"objects/{NAME}": body, "manifest.json": manifest(change)}


def test_what_is_packed_comes_out_again() -> None:
    assert cache_archive.unpacked(PACKED) == ENTRIES
    assert cache_archive.packed(dict(reversed(ENTRIES.items()))) == PACKED, "equal entries give equal bytes"
    assert cache_archive.unpacked(archive(members())) == ENTRIES, "any tar may have packed it"
    assert cache_archive.unpacked(cache_archive.packed({})) == {}


OTHER = dict([entry("steer.c")])
(OTHER_NAME,) = OTHER
HOSTILE = {
    "a symbolic link": (archive(members(), {f"objects/{NAME}": tarfile.SYMTYPE}), "not a plain file"),
    "a hard link": (archive(members(), {f"objects/{NAME}": tarfile.LNKTYPE}), "not a plain file"),
    "a device": (archive(members(), {"manifest.json": tarfile.CHRTYPE}), "not a plain file"),
    "a directory": (archive({"objects/": b"", **members()}, {"objects/": tarfile.DIRTYPE}), "not a plain file"),
    "a long name": (archive(members(), {f"objects/{NAME}": tarfile.GNUTYPE_LONGNAME}), "not a plain file"),
    "attributes": (archive(members(), {"manifest.json": tarfile.XHDTYPE}), "not a plain file"),
    "an absolute path": (archive({**members(), f"/objects/{OTHER_NAME}": b""}), "not the name of an object"),
    "a way up": (archive({**members(), f"objects/../{OTHER_NAME}": b""}), "not the name of an object"),
    "another kind": (archive({**members(), "objects/x.so": b""}), "not the name of an object"),
    "another place": (archive({**members(), OTHER_NAME: b""}), "not the name of an object"),
    "one twice": (PACKED[:-1024] + PACKED, "there twice"),
    "one that is not listed": (archive({**members(), f"objects/{OTHER_NAME}": OTHER[OTHER_NAME]}), "other objects"),
    "one that is missing": (archive(members(**{f"objects/{NAME}": None})), "other objects"),
    "no manifest": (archive(members(**{"manifest.json": None})), "its manifest cannot be understood"),
    "nothing": (b"", "does not end"),
    "another schema": (archive({**members(), "manifest.json": manifest(lambda x: x.update(schema=2))}), "schema 2"),
    "too much said": (archive({**members(), "manifest.json": manifest(lambda x: x.update(more=2))}), "understood"),
    "other bytes": (archive({**members(), f"objects/{NAME}": ENTRIES[NAME] + b" "}), "damaged"),
    "rubbish as listed": (archive(listed(b"{}")), "cannot be understood"),
    "deep rubbish": (archive(listed(b"[" * 100_000)), "cannot be understood"),
    "another program than listed": (archive(listed(OTHER[OTHER_NAME])), "something else than its name"),
    "another origin than listed": (
        archive(listed(ENTRIES[NAME], made_from=json.loads(OTHER[OTHER_NAME])["made_from"])),
        "something else than its name",
    ),
    "another program by this name": (
        archive(listed(OTHER[OTHER_NAME], made_from=json.loads(OTHER[OTHER_NAME])["made_from"])),
        "something else than its name",
    ),
    "too large": (archive(listed(bytes(cache.MOST_BYTES + 1))), "too large"),
    "cut off": (PACKED[: len(PACKED) // 2], "cut off|does not end|no tar header"),
    "something behind": (PACKED + b"x", "does not end"),
    "compressed": (b"\x1f\x8b" + PACKED, "no tar header"),
    "too many": (
        archive({**members(), **{f"objects/{n:032x}.{n:032x}": b"" for n in range(cache.MOST_ENTRIES + 1)}}),
        "too many",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_archive_that_is_not_as_it_should_be_is_refused_whole(what: str, tmp_path: Path) -> None:
    content, why = HOSTILE[what]
    with pytest.raises(ValueError, match=why):
        cache_archive.unpacked(content)
    file = tmp_path / "programs.tar"
    file.write_bytes(content)
    with pytest.raises(RefusedError, match=f"refused: .*(?:{why}).*nothing was imported"):
        cache_archive.read(file)


@given(st.integers(0, len(PACKED) - 1), st.binary(min_size=1, max_size=40), st.booleans())
def test_damage_anywhere_is_seen(at: int, by: bytes, inserted: bool) -> None:
    damaged = PACKED[:at] + by + PACKED[at + (0 if inserted else len(by)) :]
    try:
        assert cache_archive.unpacked(damaged) == ENTRIES
    except ValueError as error:
        assert str(error)


@given(st.binary(max_size=3000))
def test_rubbish_is_refused_and_nothing_else_happens(content: bytes) -> None:
    with pytest.raises(ValueError):
        cache_archive.unpacked(content)


def test_an_archive_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "programs.tar"
    cache_archive.write(file, ENTRIES)
    assert cache_archive.read(file) == ENTRIES
    with pytest.raises(UsageError, match="exists"):
        cache_archive.write(file, {})
    file.chmod(0o666)
    with pytest.raises(RefusedError, match="writable by everybody"):
        cache_archive.read(file)
    file.chmod(0o644)
    tmp_path.chmod(0o777)
    with pytest.raises(RefusedError, match="its directory"):
        cache_archive.read(file)
    tmp_path.chmod(0o700)
    with pytest.raises(UsageError, match="cannot be read"):
        cache_archive.read(tmp_path / "none.tar")


# ---- taken into a directory ----


def contents(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir()}


def test_entries_come_once_and_what_is_there_stays(tmp_path: Path) -> None:
    own = tmp_path / "deep/own"
    before = os.umask(0o077)
    try:
        assert cache_archive.take(ENTRIES, str(own)) == cache_archive.Taken(list(ENTRIES))
    finally:
        os.umask(before)
    assert contents(own) == ENTRIES
    assert {each.stat().st_mode & 0o777 for each in own.iterdir()} == {0o644} and own.stat().st_mode & 0o777 == 0o755
    assert cache_archive.take(ENTRIES, str(own)) == cache_archive.Taken([], list(ENTRIES))

    first, second, _ = ENTRIES
    other = json.loads(ENTRIES[first])
    other["functions"] = []
    (own / first).write_text(json.dumps(other))
    (own / second).write_bytes(ENTRIES[second][:50])  # torn: nothing could be loaded from it
    foreign, body = entry("probe.c", "linux-s390x")
    taken = cache_archive.take({**ENTRIES, foreign: body}, str(own))
    assert (taken.imported, len(taken.already_there)) == ([second], 1)
    assert "other instructions" in taken.refused[first] and "linux-s390x" in taken.refused[foreign]
    assert len(taken.refused) == 2 and json.loads((own / first).read_text()) == other


def test_nothing_is_half_applied(tmp_path: Path) -> None:
    own = tmp_path / "own"
    *_, last = ENTRIES
    (own / last).mkdir(parents=True)  # which no file replaces
    with pytest.raises(SwerveError, match="nothing was imported"):
        cache_archive.take(ENTRIES, str(own))
    assert [each.name for each in own.iterdir()] == [last]


def test_a_directory_in_which_others_write_is_refused_and_not_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    cache_archive.take(ENTRIES, str(own))
    shelf = cache.Shelf("", str(own))
    assert set(shelf.names()) == set(ENTRIES) and shelf.read(NAME) == ENTRIES[NAME]
    own.chmod(0o777)
    with pytest.raises(RefusedError, match="can be written by others"):
        cache_archive.take(ENTRIES, str(own))
    assert cache.Shelf(str(own)).names() == [] == cache.Shelf("", str(own)).names()
    own.chmod(0o755)
    (own / NAME).chmod(0o664)
    assert shelf.read(NAME) is None
    (own / NAME).unlink()
    (own / NAME).symlink_to("/etc/passwd")
    assert shelf.read(NAME) is None
    link = tmp_path / "link"
    link.symlink_to(own)
    with pytest.raises(SwerveError, match="cannot be written"):
        cache_archive.take(ENTRIES, str(link))


def test_who_reads_meanwhile_finds_whole_entries(tmp_path: Path) -> None:
    own = tmp_path / "own"
    bodies = {number: bytes([number]) * 200_000 for number in range(4)}
    cache.put(at := cache.opened(str(own), make=True), {NAME: bodies[0]})

    def write(number: int) -> None:
        for _ in range(20):
            cache.put(at, {NAME: bodies[number], f"{number:032x}.{number:032x}": bodies[number]})

    with ThreadPoolExecutor() as pool:
        writing = [pool.submit(write, number) for number in bodies]
        shelf = cache.Shelf("", str(own))
        while not all(each.done() for each in writing):
            assert shelf.read(NAME) in bodies.values()
            assert len(shelf.names()) <= len(bodies) + 1
    assert [each.result() for each in writing] == [None] * len(bodies)
    os.close(at)
    assert len(contents(own)) == len(bodies) + 1


def test_too_many_of_the_oldest_go(tmp_path: Path) -> None:
    own = tmp_path / "own"
    at = cache.opened(str(own), make=True)
    for number in range(cache.MOST_ENTRIES):
        (own / f"{number}.old").touch()
        os.utime(own / f"{number}.old", (number, number))
    cache.put(at, ENTRIES)
    os.close(at)
    left = contents(own)
    assert len(left) == cache.MOST_ENTRIES and ENTRIES.keys() < left.keys()
    assert "2.old" not in left and "3.old" in left


# ---- the command ----


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWERVE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / f"compiled.{os.geteuid()}"


def test_the_command_imports_and_lists(own: Path, tmp_path: Path) -> None:
    file = tmp_path / "programs.tar"
    foreign, body = entry("probe.c", "linux-s390x")
    cache_archive.write(file, {**ENTRIES, foreign: body})
    shown = CliRunner().invoke(root, ["cache", "import", str(file)])
    assert shown.output.startswith("3 imported, 0 already there, 1 refused\nrefused: probe.c is for linux-s390x")
    assert contents(own) == ENTRIES
    again = json.loads(CliRunner().invoke(root, ["cache", "import", "-j", str(file)]).output)
    assert (again["imported"], again["already_there"], list(again["refused"])) == (0, 3, [foreign])

    shown = CliRunner().invoke(root, ["cache", "list"])
    assert shown.exit_code == 0 and "other sources" in shown.output and "3 programs in" in shown.output
    rows = [json.loads(line) for line in CliRunner().invoke(root, ["cache", "list", "-j"]).output.splitlines()]
    assert {row["key"]: row["bytes"] for row in rows} == {name: len(body) for name, body in ENTRIES.items()}
    assert {row["source"] for row in rows} == {"probe.c", "tcp.c", "drops.c"}

    def listed(*words: str) -> list[str]:
        lines = CliRunner().invoke(root, ["cache", "list", "-j", *words]).output.splitlines()
        return [json.loads(line)["source"] for line in lines]

    name, large = entry("tcp.c", maps=[["table", 1, 4, 8, 1, 0]] * 9)
    (own / name).write_bytes(large)
    assert listed("--sort", "source") == ["drops.c", "probe.c", "tcp.c"]
    assert listed("--sort", "size")[0] == "tcp.c"
    assert sorted(listed("--source", "PROBE", "--source", "tcp")) == ["probe.c", "tcp.c"]
    assert "1 programs in" in CliRunner().invoke(root, ["cache", "list", "--source", "drops"]).output
    wrong = CliRunner().invoke(root, ["cache", "list", "--sort", "sise"])
    assert isinstance(wrong.exception, UsageError) and "did you mean size?" in str(wrong.exception)


def test_exit_codes_of_the_command(own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "programs.tar"
    foreign, body = entry("probe.c", "linux-s390x")
    cache_archive.write(file, {foreign: body})
    assert cli.run(root, ["cache", "import", str(file)]) == 4
    file.write_bytes(PACKED[:-1])
    assert cli.run(root, ["cache", "import", str(file)]) == 4
    assert "nothing was imported; export it again" in capfd.readouterr().err
    file.write_bytes(PACKED)
    assert cli.run(root, ["cache", "import", str(file)]) == 0
    assert cli.run(root, ["cache", "import", str(tmp_path / "none.tar")]) == 2
