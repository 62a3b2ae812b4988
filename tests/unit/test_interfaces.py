"""Names of interfaces: read anew when told to, and never worse than what was known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from pytools.errors import SwerveError
from pytools.kernel.netlink import Netlink
from pytools.sources.interfaces import Interfaces


@dataclass
class Link:
    index: int
    name: str


class Kernel:
    """Answers with these links, or not at all; counts how often it was asked."""

    def __init__(self) -> None:
        self.named: dict[int, str] | None = {7: "rail1"}
        self.asked = 0

    def links(self) -> list[Link]:
        self.asked += 1
        if self.named is None:
            raise SwerveError("no answer")
        return [Link(*each) for each in self.named.items()]


def test_names_are_read_once_until_told_to_read_them_anew() -> None:
    kernel = Kernel()
    names = Interfaces(cast(Netlink, kernel))
    assert [names.name(7), names.name(7)] == ["rail1", "rail1"]
    kernel.named = {7: "renamed"}
    assert (names.name(7), kernel.asked) == ("rail1", 1)
    names.reread()
    assert [names.name(7), names.name(7)] == ["renamed", "renamed"]
    assert kernel.asked == 2


def test_an_interface_that_comes_later_is_found_at_once() -> None:
    kernel = Kernel()
    names = Interfaces(cast(Netlink, kernel))
    names.name(7)
    kernel.named = {7: "rail1", 8: "rail2"}
    assert names.name(8) == "rail2"


def test_an_interface_that_is_gone_keeps_its_name_until_another_has_its_index() -> None:
    kernel = Kernel()
    names = Interfaces(cast(Netlink, kernel))
    names.name(7)
    kernel.named = {}
    names.reread()
    assert [names.name(7), names.name(9), names.name(9)] == ["rail1", "if9", "if9"]
    assert kernel.asked == 3
    kernel.named = {7: "new", 9: "newer"}
    names.reread()
    assert [names.name(7), names.name(9)] == ["new", "newer"]


def test_a_kernel_that_does_not_answer_is_asked_again() -> None:
    kernel = Kernel()
    kernel.named = None
    names = Interfaces(cast(Netlink, kernel))
    assert names.name(7) == "if7"
    kernel.named = {7: "rail1"}
    assert names.name(7) == "rail1"
    kernel.named = None
    names.reread()
    assert names.name(7) == "rail1"
