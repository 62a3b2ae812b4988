"""Names of interfaces: read anew when told to, and never worse than what was known."""

from __future__ import annotations

import errno
import socket

import pytest

from pytools.sources.interfaces import Interfaces


class Kernel:
    """Knows these interfaces, or says nothing at all; counts how often it was asked."""

    def __init__(self) -> None:
        self.named: dict[int, str] | None = {7: "rail1"}
        self.asked = 0

    def name(self, ifindex: int) -> str:
        self.asked += 1
        if self.named is None:
            raise OSError(errno.EMFILE, "no answer")
        if ifindex not in self.named:
            raise OSError(errno.ENXIO, "no such device")
        return self.named[ifindex]


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def names(kernel: Kernel) -> Interfaces:
    return Interfaces(kernel.name)


def test_names_are_read_once_until_told_to_read_them_anew(kernel: Kernel, names: Interfaces) -> None:
    assert [names.name(7), names.name(7)] == ["rail1", "rail1"]
    kernel.named = {7: "renamed"}
    assert (names.name(7), kernel.asked) == ("rail1", 1)
    names.reread()
    assert [names.name(7), names.name(7)] == ["renamed", "renamed"]
    assert kernel.asked == 2


def test_an_interface_that_comes_later_is_found_at_once(kernel: Kernel, names: Interfaces) -> None:
    names.name(7)
    kernel.named = {7: "rail1", 8: "rail2"}
    assert names.name(8) == "rail2"


def test_an_interface_that_is_gone_keeps_its_name_until_another_has_its_index(
    kernel: Kernel, names: Interfaces
) -> None:
    names.name(7)
    kernel.named = {}
    names.reread()
    assert [names.name(7), names.name(9), names.name(9)] == ["rail1", "if9", "if9"]
    assert kernel.asked == 3
    kernel.named = {7: "new", 9: "newer"}
    names.reread()
    assert [names.name(7), names.name(9)] == ["new", "newer"]


def test_a_kernel_that_does_not_answer_is_asked_again(kernel: Kernel, names: Interfaces) -> None:
    kernel.named = None
    assert names.name(7) == "if7"
    kernel.named = {7: "rail1"}
    assert names.name(7) == "rail1"
    kernel.named = None
    names.reread()
    assert names.name(7) == "rail1"


def test_the_kernel_knows_the_loopback_interface() -> None:
    assert Interfaces().name(socket.if_nametoindex("lo")) == "lo"
    with pytest.raises(OSError) as refused:
        socket.if_indextoname(1 << 30)
    assert refused.value.errno == errno.ENXIO
