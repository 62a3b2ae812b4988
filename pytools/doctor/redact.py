"""What must not leave a host in a support bundle: secrets, what processes are called, and on request addresses.

Pure functions of values as JSON has them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

LEFT_OUT: Final = "(left out)"
_SECRET: Final = re.compile(r"(^|[_-])(key|secret|passw(or)?d|passphrase|token|credential)s?($|[_-])", re.IGNORECASE)
_PROCESS: Final = frozenset({"command", "cmdline", "cgroup", "container", "environ"})
_BY_PROCESS: Final = frozenset({"seen"})  # names in these begin with a process, "815 ib_write_bw"
_V4: Final = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\d)")
_HARDWARE: Final = re.compile(r"(?<![0-9A-Fa-f:])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5,19}(?![0-9A-Fa-f:])")
_V6: Final = re.compile(r"(?:[0-9A-Fa-f]{0,4}:){2,}[0-9A-Fa-f:.]*")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def cleaned(value: Any) -> Any:
    """Without secrets, and without what tells one process of a user from another."""
    if isinstance(value, dict):
        return {name: _field(str(name), each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(each) for each in value]
    return value


def _field(name: str, value: Any) -> Any:
    if name in _PROCESS:
        return "" if isinstance(value, str) else LEFT_OUT
    if _SECRET.search(name) and isinstance(value, str) and value:
        return LEFT_OUT
    if name in _BY_PROCESS and isinstance(value, dict):
        return {str(each).split(" ")[0]: how for each, how in value.items()}
    return cleaned(value)


class Addresses:
    """Puts a number in the place of every address outside some prefixes, the same for the same address.

    Parameters
    ----------
    managed : sequence of str
        Prefixes whose addresses stay; what is none is left aside.
    """

    def __init__(self, managed: Sequence[str]) -> None:
        self._managed: list[Network] = []
        for each in managed:
            try:
                self._managed.append(ipaddress.ip_network(each, strict=False))
            except ValueError:
                continue
        self._numbers: dict[str, str] = {}

    @property
    def replaced(self) -> int:
        return len(self._numbers)

    def hidden(self, value: Any) -> Any:
        """A value without them, names of fields included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(name)): self.hidden(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden(each) for each in value]
        return value

    def text(self, words: str) -> str:
        for pattern, replace in ((_HARDWARE, self._hardware), (_V4, self._v4), (_V6, self._v6)):
            words = pattern.sub(_group(replace), words)
        return words

    def _hardware(self, found: str) -> str:
        return found if set(found) <= set("0:") else self._number("mac", found.lower())

    def _v4(self, found: str) -> str:
        return self._known(found, found)

    def _v6(self, found: str) -> str:
        # One colon in front or behind, or a full stop, is the sentence's; two are the address's, the third is not.
        core = found.rstrip(".")
        front = ":" if core.startswith(":::") or (core.startswith(":") and not core.startswith("::")) else ""
        core = core[len(front) :]
        if core.endswith(":::") or (core.endswith(":") and not core.endswith("::")):
            core = core[:-1]
        if "::" not in core and core.count(":") < 7:
            return found  # a time of day, and the like
        return front + self._known(core, core) + found[len(front) + len(core) :]

    def _known(self, found: str, key: str) -> str:
        try:
            address = ipaddress.ip_address(found)
        except ValueError:
            # 999.1.1.1 is no address; what looks like IPv6 and is none may hold one.
            return self._number("ip", key) if ":" in found else found
        plain = getattr(address, "ipv4_mapped", None) or address
        if plain.is_unspecified or plain.is_loopback or any(plain in each for each in self._managed):
            return found
        return self._number("ip", str(plain))

    def _number(self, kind: str, key: str) -> str:
        return self._numbers.setdefault(key, f"{kind}-{len(self._numbers) + 1}")


def _group(replace: Callable[[str], str]) -> Callable[[re.Match[str]], str]:
    return lambda match: replace(match[0])
