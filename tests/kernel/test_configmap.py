"""A configuration in a volume as kubelet makes it: obeyed where it is mounted read-only, refused where it is not.

The volume has mode 0777. The file in it is a link into a directory that `..data`, a link too, names: of mode 0755, and
replaced as a whole. Needs root, to mount.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import support

from pytools import config
from pytools.errors import RefusedError

pytestmark = pytest.mark.guest(thorough=True)  # what is asked of files and mounts is alike in all kernels


def put(volume: Path, host: str) -> None:
    """Replace what is in the volume."""
    fresh = volume / f"..{host}"
    fresh.mkdir(mode=0o755)
    (fresh / "agent.yaml").write_text(f"host: {host}\npeers: []\n")
    (fresh / "agent.yaml").chmod(0o444)
    (volume / "..new").symlink_to(fresh.name)
    os.replace(volume / "..new", volume / "..data")


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    support.require("root")
    made = tmp_path / "volume"
    made.mkdir()
    made.chmod(0o777)
    put(made, "h1")
    (made / "agent.yaml").symlink_to("..data/agent.yaml")
    return made


@pytest.fixture
def mounted(volume: Path, tmp_path: Path) -> Iterator[Path]:
    """The volume at another place, where nothing can be written."""
    place = tmp_path / "etc"
    place.mkdir(mode=0o755)
    support.run(["mount", "--bind", str(volume), str(place)])
    try:
        support.run(["mount", "-o", "remount,bind,ro", str(place)])
        yield place
    finally:
        support.run(["umount", str(place)])


def test_it_is_obeyed_where_the_mount_is_read_only_and_so_is_its_successor(volume: Path, mounted: Path) -> None:
    assert config.load(mounted / "agent.yaml").host == "h1"
    put(volume, "h2")
    assert config.load(mounted / "agent.yaml").host == "h2"


def test_it_is_refused_where_the_volume_itself_is_named(volume: Path) -> None:
    with pytest.raises(RefusedError, match=r"its directory \S+/volume is writable by everybody \(mode 0777\)"):
        config.load(volume / "agent.yaml")


@pytest.mark.parametrize(("what", "mode"), [("..h1", 0o777), ("..h1", 0o775), ("..h1/agent.yaml", 0o666)])
def test_a_read_only_mount_excuses_only_the_directory_of_the_link(
    volume: Path, mounted: Path, what: str, mode: int
) -> None:
    (volume / what).chmod(mode)
    with pytest.raises(RefusedError, match="is writable by "):
        config.load(mounted / "agent.yaml")


def test_a_file_that_is_no_link_is_not_excused(volume: Path, mounted: Path) -> None:
    (volume / "plain.yaml").write_text("host: h1\npeers: []\n")
    with pytest.raises(RefusedError, match=r"its directory \S+/etc is writable by everybody"):
        config.load(mounted / "plain.yaml")


def test_another_users_volume_is_refused(volume: Path, mounted: Path) -> None:
    os.chown(volume, 65534, 65534)
    with pytest.raises(RefusedError, match="belongs to user 65534"):
        config.load(mounted / "agent.yaml")
