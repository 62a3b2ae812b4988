"""Sessions of one run share files of tests (tests/conftest.py): each test runs once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import support


def test_each_file_is_run_whole_by_the_session_that_comes_to_it_first(tmp_path: Path) -> None:
    files = [f"kernel/{name}" for name in "abc"] + [f"fabric/{name}" for name in "cba"]  # of one name, in two tiers
    items = [SimpleNamespace(path=Path("tests", file), number=number) for file in files for number in range(3)]
    sessions = [support.not_begun(items, tmp_path) for _ in range(2)]
    shares = [[next(each)] for each in sessions]
    shares[0] += [next(sessions[0]) for _ in range(6)]
    for share, rest in zip(shares, sessions, strict=True):
        share.extend(rest)
    assert [[str(item.path)[6:] for item in share[::3]] for share in shares] == [[files[0], *files[2:]], [files[1]]]
    assert all([item.number for item in share] == [0, 1, 2] * (len(share) // 3) for share in shares)
