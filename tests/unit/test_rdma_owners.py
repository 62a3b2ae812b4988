"""Owners of queue pairs: what a process and its group are called is fit for a terminal."""

from __future__ import annotations

from pathlib import Path

from pytools.sources.rdma.owners import cgroup_path, process_owner


def test_names_that_others_chose_are_made_printable(tmp_path: Path) -> None:
    place = tmp_path / "17"
    place.mkdir()
    (place / "cgroup").write_bytes(b"0::/jobs/\x1b[2J\x9b\xffa\n")
    (place / "comm").write_bytes(b"a\x1b[1m\n")
    owner = process_owner(17, tmp_path)
    mark = "\N{REPLACEMENT CHARACTER}"
    assert (owner.cgroup, owner.command) == (f"/jobs/{mark}[2J{mark}{mark}a", f"a{mark}[1m")


def test_the_unified_hierarchy_is_preferred() -> None:
    assert cgroup_path("12:cpu:/a/long/one\n0::/b\n") == "/b"
    assert cgroup_path("12:cpu:/a/long/one\n3:memory:/a\n0::/\n") == "/a/long/one"
    assert cgroup_path("0::/gone (deleted)\n") == "/gone"


def test_a_process_that_is_gone_has_but_its_number(tmp_path: Path) -> None:
    owner = process_owner(18, tmp_path)
    assert (owner.pid, owner.command, owner.cgroup, owner.container) == (18, "", "", "")
