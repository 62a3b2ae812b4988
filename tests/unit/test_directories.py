"""Where configurations and policies are looked for, and which of them are not obeyed."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from steering_kit import POLICY
from support import ROOT, mentions

from pytools import config, directories
from pytools.errors import RefusedError
from steering.cli import root
from steering.policy import file as policy_file

WHERE = ("own", "here", "home", "etc")  # in the order of the search


@pytest.fixture
def dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Empty directories in place of the instance's, the working one, the user's and the system's."""
    found = {
        "own": tmp_path / "run" / "t1",
        "here": tmp_path / "here",
        "home": tmp_path / "config" / "swerve",
        "etc": tmp_path / "etc",
    }
    for each in found.values():
        each.mkdir(parents=True, mode=0o755)
        each.chmod(0o755)
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(directories, "_SYSTEM", found["etc"])
    monkeypatch.chdir(found["here"])
    return found


def put(directory: Path, name: str) -> Path:
    place = directory / name
    place.write_text("host: h1\npeers: []\n")
    place.chmod(0o644)
    return place


@pytest.mark.parametrize("first", range(len(WHERE)))
def test_the_nearest_configuration_is_taken(dirs: dict[str, Path], first: int) -> None:
    expected, *_ = [put(dirs[where], "agent.yaml") for where in WHERE[first:]]
    assert directories.default_config("t1") == expected


@pytest.mark.parametrize("first", range(1, len(WHERE)))
def test_a_policy_is_no_instances_own(dirs: dict[str, Path], first: int) -> None:
    put(dirs["own"], "policy.yaml")
    expected, *_ = [put(dirs[where], "policy.yaml") for where in WHERE[first:]]
    assert directories.default_policy() == expected


def test_without_any_it_is_the_systems_that_is_missing(dirs: dict[str, Path]) -> None:
    assert directories.default_config("t1") == dirs["etc"] / "agent.yaml"
    assert directories.default_policy() == dirs["etc"] / "policy.yaml"


@pytest.mark.parametrize("target", ["agent.yaml", "nowhere"], ids=["itself", "nothing"])
def test_a_link_that_leads_nowhere_is_not_passed_over(dirs: dict[str, Path], target: str) -> None:
    put(dirs["etc"], "agent.yaml")
    (dirs["here"] / "agent.yaml").symlink_to(target)
    with pytest.raises(RefusedError, match=r"here/agent\.yaml: refused: it is a link that cannot be followed"):
        directories.default_config("t1")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("writable", [stat.S_IWGRP, stat.S_IWOTH], ids=["group", "everybody"])
@pytest.mark.parametrize("what", ["the file", "its directory"])
def test_what_others_can_write_is_refused_and_not_passed_over(
    dirs: dict[str, Path], where: str, writable: int, what: str
) -> None:
    for each in WHERE[WHERE.index(where) :]:
        put(dirs[each], "agent.yaml")
    harmed = dirs[where] / "agent.yaml" if what == "the file" else dirs[where]
    harmed.chmod(stat.S_IMODE(harmed.stat().st_mode) | writable)
    with pytest.raises(RefusedError, match=f"refused: {what}.* is writable by ") as said:
        directories.default_config("t1")
    assert said.value.what.startswith(str(dirs[where] / "agent.yaml"))
    assert "--config" in said.value.next_step


def test_a_sticky_directory_does_not_do(dirs: dict[str, Path]) -> None:
    put(dirs["here"], "policy.yaml")
    dirs["here"].chmod(0o1777)
    with pytest.raises(RefusedError, match="writable by everybody") as said:
        directories.default_policy()
    assert "--policy" in said.value.next_step


def test_a_link_does_not_hide_where_the_file_is(dirs: dict[str, Path], tmp_path: Path) -> None:
    elsewhere = tmp_path / "open"
    elsewhere.mkdir()
    (dirs["here"] / "agent.yaml").symlink_to(put(elsewhere, "x.yaml"))
    assert directories.default_config("t1") == dirs["here"] / "agent.yaml"
    elsewhere.chmod(0o777)
    with pytest.raises(RefusedError, match=f"its directory {elsewhere} is writable by everybody"):
        directories.default_config("t1")


@pytest.mark.parametrize("which", ["the file", "its directory"])
def test_what_belongs_to_another_user_is_refused(
    dirs: dict[str, Path], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = put(dirs["here"], "agent.yaml") if which == "the file" else dirs["here"]
    (dirs["here"] / "agent.yaml").touch()
    real = Path.stat

    def foreign(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = list(real(self, follow_symlinks=follow_symlinks))
        found[4] = 4242 if self == owned else os.geteuid()
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", foreign)
    with pytest.raises(RefusedError, match=f"{which}.* belongs to user 4242, not to root"):
        directories.default_config("t1")


def test_a_file_of_another_user_is_no_more_trusted_when_it_is_open(dirs: dict[str, Path]) -> None:
    opened = list(os.stat(put(dirs["here"], "agent.yaml")))
    opened[stat.ST_UID] = 4242
    assert "user 4242" in directories.unsafe(dirs["here"] / "agent.yaml", os.stat_result(opened))


FILES = {config.load: "host: h1\npeers: []\n", policy_file.load: POLICY}
loads = pytest.mark.parametrize("load", FILES, ids=["configuration", "policy"])


@loads
@pytest.mark.parametrize("writable", [stat.S_IWGRP, stat.S_IWOTH], ids=["group", "everybody"])
@pytest.mark.parametrize("what", ["the file", "its directory"])
def test_a_file_that_is_named_is_no_more_trusted(
    dirs: dict[str, Path], load: Callable[[Path], object], writable: int, what: str
) -> None:
    named = put(dirs["here"], "other.yaml")
    named.write_text(FILES[load])
    assert load(named)
    harmed = named if what == "the file" else dirs["here"]
    harmed.chmod(stat.S_IMODE(harmed.stat().st_mode) | writable)
    with pytest.raises(RefusedError, match=f"refused: {what}.* is writable by ") as caught:
        load(named)
    assert caught.value.exit_code == 4
    assert harmed.stat().st_uid == os.geteuid()  # who owns it does not matter: who else may write it does


@pytest.mark.parametrize("command", ["agent", "replay", "report x.html"])
def test_whatever_command_it_is_named_to_refuses_it(dirs: dict[str, Path], command: str) -> None:
    named = put(dirs["here"], "other.yaml")
    named.chmod(0o666)
    done = CliRunner().invoke(root, [*command.split(), "--config", str(named)])
    assert isinstance(done.exception, RefusedError)
    assert mentions(str(done.exception), "other.yaml", "refused", "writable by everybody")


@loads
def test_a_pipe_is_no_file_and_not_waited_for(dirs: dict[str, Path], load: Callable[[Path], object]) -> None:
    os.mkfifo(dirs["here"] / "pipe.yaml", 0o600)
    with pytest.raises(RefusedError, match="not a regular file"):
        load(dirs["here"] / "pipe.yaml")


def test_a_file_of_root_is_trusted_by_everybody(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    place = put(dirs["etc"], "agent.yaml")
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    owner = place.stat().st_uid
    assert (directories.unsafe(place, place.stat()) == "") == (owner == 0)


def test_a_directory_of_that_name_is_no_configuration(dirs: dict[str, Path]) -> None:
    (dirs["here"] / "agent.yaml").mkdir()
    with pytest.raises(RefusedError, match="not a regular file"):
        directories.default_config("t1")


def test_a_relative_xdg_directory_is_ignored(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    nested = dirs["here"] / "config" / "swerve"
    nested.mkdir(parents=True)
    put(nested, "agent.yaml")
    assert directories.default_config("t1") == dirs["etc"] / "agent.yaml"


def test_without_xdg_it_is_in_the_home(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert directories.searched("agent.yaml") == [
        dirs["here"] / "agent.yaml",
        tmp_path / ".config/swerve/agent.yaml",
        dirs["etc"] / "agent.yaml",
    ]


def test_a_working_directory_that_is_gone_is_no_error(dirs: dict[str, Path]) -> None:
    dirs["here"].rmdir()
    expected = put(dirs["home"], "agent.yaml")
    assert directories.default_config("t1") == expected


def test_what_cannot_be_looked_at_is_passed_over(dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (dirs["home"].parent / "swerve").rmdir()
    dirs["home"].parent.joinpath("swerve").write_text("a file where a directory is looked for")
    expected = put(dirs["etc"], "agent.yaml")
    assert directories.default_config("t1") == expected


# ---- pages ----


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Directories in place of a checkout's pages and the package's."""
    found = tmp_path / "checkout/docs", tmp_path / "usr/share/doc/swerve/docs"
    monkeypatch.setattr(directories, "PAGES", found)
    directories.page.cache_clear()
    yield found
    directories.page.cache_clear()


@pytest.mark.parametrize("there", [(0, 1), (0,), (1,)])
def test_a_page_is_named_where_it_is(pages: tuple[Path, Path], there: tuple[int, ...]) -> None:
    for each in there:
        pages[each].mkdir(parents=True)
        (pages[each] / "config.md").touch()
    assert directories.page("config.md") == f"{pages[there[0]]}/config.md"


def test_where_no_page_was_installed_it_is_in_the_sources(pages: tuple[Path, Path]) -> None:
    assert directories.page("config.md") == "docs/config.md in swerve's sources"


@pytest.mark.slow
def test_every_page_that_is_named_is_there_and_none_is_named_without_its_place() -> None:
    """Docstrings and help are for the sources' readers; all else that names a page is read wherever swerve runs."""
    named = []
    for source in (file for package in ("pytools", "steering") for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if not isinstance(node, ast.Call):
                continue
            inside = [each for argument in node.args for each in ast.walk(argument)]
            said = [str(each.value) for each in inside if isinstance(each, ast.Constant)]
            assert not [each for each in said if re.search(r"docs/\w", each)], f"{source}: say directories.page(...)"
            match node.func:
                case ast.Name("page") | ast.Attribute(ast.Name("directories"), "page"):
                    named += said
    assert len(named) > 10
    for name in named:
        assert Path(directories.page(name)) == ROOT / "docs" / name and (ROOT / "docs" / name).exists(), name
