"""Descriptors lent over a socket: who gets them, and when a loan ends."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator
from pathlib import Path

import pytest
import support

from pytools.errors import SwerveError
from pytools.ipc.map_lending import Lender, Loan


class Borrower:
    """The other end, which notes what happens to it."""

    def __init__(self, path: Path, selector: selectors.BaseSelector) -> None:
        self.maps: dict[str, int] = {}
        self.over = 0
        self.loan = Loan(path, selector, self.maps.update, self._ended)

    def _ended(self) -> None:
        self.over += 1


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


def turn(selector: selectors.BaseSelector) -> bool:
    for key, mask in selector.select(0):
        key.data(mask)
    return True


def test_what_is_lent_is_the_same_file_by_its_name(tmp_path: Path, selector: selectors.BaseSelector) -> None:
    read, write = os.pipe()
    lender = Lender(tmp_path / "run" / "maps.sock", {"one": read, "other": write})
    lender.register(selector)
    borrower = Borrower(tmp_path / "run" / "maps.sock", selector)
    support.wait_until(lambda: turn(selector) and borrower.maps, 20, "the maps are lent")
    assert set(borrower.maps) == {"one", "other"}
    os.write(borrower.maps["other"], b"x")
    assert os.read(read, 1) == b"x"
    lender.close()
    support.wait_until(lambda: turn(selector) and borrower.over, 20, "the loan is over")
    assert not (tmp_path / "run" / "maps.sock").exists()
    for fd in (read, write, *borrower.maps.values()):
        os.close(fd)


def test_a_borrower_that_goes_makes_room(tmp_path: Path, selector: selectors.BaseSelector) -> None:
    read, write = os.pipe()
    lender = Lender(tmp_path / "run" / "maps.sock", {"one": read})
    lender.register(selector)
    for _ in range(20):
        borrower = Borrower(tmp_path / "run" / "maps.sock", selector)
        support.wait_until(lambda b=borrower: turn(selector) and b.maps, 20, "the map is lent")  # type: ignore[misc]
        os.close(borrower.maps["one"])
        borrower.loan.close()
        support.wait_until(lambda: turn(selector) and not lender.borrowers, 20, "the lender has noticed")
    crowd = [Borrower(tmp_path / "run" / "maps.sock", selector) for _ in range(9)]
    support.wait_until(
        lambda: turn(selector) and sum(bool(b.maps) + b.over for b in crowd) == 9, 5, "all have an answer"
    )
    assert [bool(each.maps) for each in crowd].count(True) == 8
    assert lender.drops() == {"maps_not_lent": 1, "maps_accept_paused": 0}
    for each in crowd:
        each.loan.close()
        for fd in each.maps.values():
            os.close(fd)
    lender.close()
    os.close(read)
    os.close(write)


def test_without_a_lender_it_is_said_at_once(tmp_path: Path, selector: selectors.BaseSelector) -> None:
    with pytest.raises(SwerveError, match="No such file"):
        Borrower(tmp_path / "maps.sock", selector)
