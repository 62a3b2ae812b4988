"""Where the uprobes are put: processes that run already, stripped libraries, hosts and libraries without RDMA."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import native_build
import numpy as np
import pytest
from rdma_probes import Seen, attach, devices, loaded, prepare, sums
from support import require, run, wait_until

from pytools.errors import SwerveError
from pytools.kernel import rdma_class
from pytools.kernel.bpf.loader import Loaded, Program, load
from pytools.kernel.bpf.syscall import has_tcx
from pytools.kernel.bpf.uprobes import Uprobe, close_all
from pytools.kernel.elf import build_id
from pytools.sources.rdma import providers
from pytools.sources.rdma.providers import Uprobes

__all__ = ["devices", "loaded"]  # fixtures


@pytest.mark.parametrize("strip", [False, True], ids=["symbols", "stripped"])
def test_processes_that_run_already(loaded: Loaded, devices: Path, strip: bool) -> None:
    """What was posted before is not there; nothing is told twice, and sq_sig_all is found out."""
    library = {"LD_LIBRARY_PATH": str(native_build.fake_verbs(strip))}
    seen = Seen(loaded, devices, strip)
    with native_build.App(more=library) as app, native_build.App(more=library) as all_signalled:
        prepare(app)
        prepare(all_signalled, signal_all=1)
        app.do("post 0 5 100 0 1 1 1")
        with contextlib.closing(seen.uprobes):
            seen.attach()
            app.do("post 0 3 10 0 3 100 1")
            app.do("poll 0 99")
            assert sums(seen.row(app.pid)) == {
                **{"posted": 3, "posted_bytes": 30, "signalled": 1},
                **{"completed": 3, "completed_bytes": 30, "completions": 6},
            }
            all_signalled.do("post 0 4 10 0 0 1 1")
            all_signalled.do("poll 0 99")
            assert sums(seen.row(all_signalled.pid)) == {
                **{"posted": 4, "posted_bytes": 40, "completed": 4, "completed_bytes": 40, "completions": 4}
            }
            seen.free_all()


def test_probes_end_with_their_owner(loaded: Loaded, devices: Path) -> None:
    seen = Seen(loaded, devices)
    seen.attach()
    with native_build.App() as app:
        prepare(app)
        records = seen.records
        [slot] = seen.slots(app.pid)
        seen.uprobes.close()
        app.do("post 0 3 10 0 1 1 1")
        assert records[slot]["posted"] == 0


# ---- where things are missing ----


@pytest.mark.parametrize("ends", [False, True], ids=["goes_on", "ends"])
def test_a_process_with_a_copy_of_the_library_is_followed_while_it_lives(
    loaded: Loaded, devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """As in a container, whose files can be reached only through the process."""
    shutil.copytree(native_build.fake_verbs(False), tmp_path / "copy")
    with (
        native_build.App(more={"LD_LIBRARY_PATH": str(tmp_path / "copy")}) as app,
        contextlib.closing(Seen(loaded, devices).uprobes) as uprobes,
    ):
        prepare(app)
        looked = []

        def look(path: str) -> str:
            found = build_id(path)
            if path.startswith(f"/proc/{app.pid}/"):
                looked.append(path)
                if ends:
                    app.close()
            return found

        monkeypatch.setattr(providers, "build_id", look)
        attach(uprobes)
        assert looked and not uprobes.failed
        if not ends:
            app.do("post 0 3 10 0 1 1 1")
            app.do("poll 0 99")
            table = uprobes.table
            assert table is not None and table.records["posted"][table.records["tgid"] == app.pid].tolist() == [3]
            table.free(int(np.flatnonzero(table.records["tgid"] == app.pid)[0]))


def test_without_rdma_the_reason_is_told(loaded: Loaded, tmp_path: Path) -> None:
    uprobes = Uprobes(loaded, tmp_path / "infiniband")
    with contextlib.closing(uprobes):
        assert uprobes.tick(0) > 0
        assert uprobes.tables() == []
        assert "no RDMA" in uprobes.sight().reason
    (tmp_path / "infiniband").mkdir()
    assert "no RDMA device" in rdma_class.absent(tmp_path / "infiniband")


@pytest.mark.parametrize(
    ("library", "words"), [("libverbs-of-nobody.so.9", "cannot be used"), ("libc.so.6", "cannot be used")]
)
def test_a_library_that_is_none(loaded: Loaded, devices: Path, library: str, words: str) -> None:
    uprobes = Uprobes(loaded, devices, library)
    with contextlib.closing(uprobes):
        wait_until(lambda: uprobes.tick(time.monotonic_ns()) and uprobes.failed, 20, "the child answers")
        assert uprobes.tables() == []
        assert any(words in each for each in uprobes.failed.values())
        assert words in uprobes.sight().reason


def test_a_place_without_code_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(SwerveError, match="no breakpoint"):
        Uprobe(loaded.programs["rdma_poll"], str(tmp_path / "empty"), 4096)
    with pytest.raises(SwerveError, match="no breakpoint"):
        Uprobe(loaded.programs["rdma_poll"], str(tmp_path / "missing"), 0)


def post_send_of_alpha() -> tuple[str, int]:
    """The library and the offset of a provider's function."""
    library = str(native_build.fake_verbs(False) / "libalpha-rdmav34.so")
    symbols = run(["nm", library]).stdout.splitlines()
    return library, next(int(line.split()[0], 16) for line in symbols if line.endswith("alpha_post_send"))


def test_breakpoints_are_links_where_the_kernel_has_them(loaded: Loaded) -> None:
    """Since 6.6, as those at TC: events of perf take 0.1 s each to be removed, one after the other."""
    with load([Program("empty.c", ("empty",))]) as empty:
        has_links = has_tcx(empty.programs["empty"])
    probes = [Uprobe(loaded.programs["rdma_post_send"], *post_send_of_alpha()) for _ in range(3)]
    assert [each.linked for each in probes] == [has_links] * 3
    close_all(probes)
    with native_build.App() as app:
        prepare(app)
        before = int(loaded.map("rdma_counters").read_percpu_sum()[0])
        app.do("post 0 1 1 0 1 1 1")
        assert int(loaded.map("rdma_counters").read_percpu_sum()[0]) == before


def test_one_process_alone_may_be_probed(devices: Path) -> None:
    require("root", "bcc", "tracefs")
    library, offset = post_send_of_alpha()
    program = Program("rdma.c", ("rdma_post_send",), {}, {"rdma_post_send": "uprobe"})
    with load([program]) as alone, native_build.App() as one, native_build.App() as other:
        for app in (one, other):
            prepare(app)
        hits: Callable[[], int] = lambda: int(alone.map("rdma_counters").read_percpu_sum()[0])  # noqa: E731
        with Uprobe(alone.programs["rdma_post_send"], library, offset, pid=one.pid):
            other.do("post 0 1 1 0 1 1 1")
            assert hits() == 0
            one.do("post 0 1 1 0 1 1 1")
            assert hits() == 1
        one.do("post 0 1 1 0 1 1 1")
        assert hits() == 1


def test_build_ids_tell_files_apart(tmp_path: Path) -> None:
    paths = [str(native_build.fake_verbs(False) / f"lib{name}-rdmav34.so") for name in ("alpha", "beta")]
    first, second = (build_id(path) for path in paths)
    assert first
    assert first != second
    noted = run(["readelf", "-n", paths[0]]).stdout
    assert f"Build ID: {first}" in noted
    (tmp_path / "text").write_text("no library")
    assert build_id(str(tmp_path / "text")) == ""
