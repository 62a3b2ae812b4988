"""The direction of imports is the one that docs/architecture.md draws: every arrow points down.

Reads the sources; imports nothing. Imports inside functions and under TYPE_CHECKING count like any other.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping

import pytest
from support import ROOT

# From the bottom up; a room may use its own modules and every layer below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("pytools.errors", "pytools.closing"),
    ("pytools.signals", "pytools.directories", "pytools.yaml_reader", "pytools.owned_files", "pytools.units"),
    ("pytools.figures", "pytools.config_units"),
    ("pytools.kernel", "pytools.estimators", "pytools.config", "pytools.schema"),
    ("pytools.log", "pytools.notify", "pytools.streams"),
    ("pytools.ipc",),
    ("pytools.lab", "pytools.recording"),
    ("pytools.sources", "pytools.views"),
    ("pytools.doctor",),
    ("pytools.agent",),
    ("pytools.cli_options",),
    ("pytools.cli_history", "pytools.cli_tables"),
    ("pytools.cli",),
    ("steering.plan", "steering.prefixes"),
    ("steering.policy",),
    ("steering.deciding", "steering.cli_types"),
    ("steering.hold",),
    ("steering.flows", "steering.actuators"),
    ("steering.elapsed",),
    ("steering.acting",),
    ("steering.guarding",),
    ("steering.control", "steering.agent_link"),
    ("steering.controller", "steering.replay"),
    ("steering.commands",),
    ("steering.cli",),
    ("steering.demo",),
)
VOCABULARY = (
    "pytools.errors",
    "pytools.signals",
    "pytools.figures",
    "pytools.directories",
    "pytools.units",
    "pytools.yaml_reader",
)
DECIDING = (
    *("steering.policy", "steering.deciding", "steering.hold", "steering.flows"),
    *("steering.plan", "steering.prefixes"),
)
ACTUATORS = ("steering.actuators",)
PURE = (
    "pytools.estimators",
    "steering.deciding",
    "steering.hold",
    "steering.flows",
    "steering.plan",
    "pytools.units",
)
DOES_IO = frozenset(
    {
        *("asyncio", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "selectors", "shutil"),
        *("signal", "socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time", "urllib"),
        *("bcc", "click", "pyroute2", "rich", "yaml"),
    }
)
KERNEL_LIBRARIES = frozenset({"bcc", "pyroute2"})
KERNEL_ROOMS = ("pytools.kernel", "pytools.lab")  # the lab makes interfaces, which nothing else here does


def in_room(module: str, room: str) -> bool:
    """Whether a module is the room, or lies in it."""
    return module == room or module.startswith(room + ".")


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every dotted name that a source imports, relative ones made absolute."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


@functools.cache
def sources() -> Mapping[str, list[str]]:
    """Module -> what it imports, for both packages."""
    found = {}
    for path in sorted(file for package in ("pytools", "steering") for file in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found[module] = list(imports(path.read_text(), module, is_package))
    return found


def layer(module: str) -> int | None:
    """The layer a module or an imported name lies in; None for the bare packages and for foreign names."""
    for index, rooms in enumerate(LAYERS):
        if any(in_room(module, room) for room in rooms):
            return index
    return None


def room_of(module: str) -> str:
    """The room a module lies in."""
    return next(room for rooms in LAYERS for room in rooms if in_room(module, room))


def complaints(module: str, used: str) -> Iterator[str]:
    """What is wrong with one import of one module of ours."""
    top = used.split(".", maxsplit=1)[0]
    ours = top in ("pytools", "steering")
    if any(in_room(module, room) for room in PURE) and top in DOES_IO:
        yield "a pure room imports what does input or output"
    if top in KERNEL_LIBRARIES and not any(in_room(module, room) for room in KERNEL_ROOMS):
        yield "only pytools.kernel (and the lab) talk to the kernel"
    if not ours or module in ("pytools", "steering"):
        return
    here, there = layer(module), layer(used)
    if here is None:
        yield "this module is in no layer of tests/unit/test_imports.py: give it one"
    elif there is None and used not in ("pytools", "steering"):
        yield "the imported module is in no layer"
    elif there is not None and there >= here and room_of(module) != room_of(used):
        yield "an import that does not point down"
    allowed: tuple[str, ...] | None = None
    if any(in_room(module, room) for room in DECIDING):
        allowed = (*VOCABULARY, *DECIDING)
    elif any(in_room(module, room) for room in ACTUATORS):
        allowed = (*VOCABULARY, *DECIDING, *ACTUATORS, "pytools.kernel", "pytools.closing")
    if allowed is not None and not any(in_room(used, room) for room in allowed):
        yield "the deciding half knows signals only, actuators the kernel besides"


def test_every_import_points_down() -> None:
    wrong = [
        f"{module} imports {used}: {complaint}"
        for module, names in sources().items()
        for used in names
        for complaint in complaints(module, used)
    ]
    assert not wrong, "\n".join(wrong)


def circles(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules that lie on a circle of imports."""
    left = {
        module: {used if used in graph else used.rpartition(".")[0] for used in names} & graph.keys() - {module}
        for module, names in graph.items()
    }
    while ends := {module for module, used in left.items() if not used}:
        left = {module: used - ends for module, used in left.items() if module not in ends}
    return sorted(left)


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module: names for module, names in sources().items() if module not in ("pytools", "steering")}
    assert circles(modules) == []
    assert circles({"a": ["b.name"], "b": ["c"], "c": ["a.name"], "d": []}) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("module", "used"),
    [
        ("pytools.views.top", "steering.deciding.health.Health"),
        ("pytools.kernel.bpf.loader", "pytools.sources.tcp.TcpSource"),
        ("pytools.ipc.client", "pytools.views.model"),
        ("pytools.sources.tcp", "pytools.views.model"),
        ("pytools.estimators.windows", "time"),
        ("pytools.sources.links", "pyroute2.IPRoute"),
        ("steering.deciding.decide", "pytools.kernel.netlink.routing"),
        ("steering.policy.file", "pytools.views.model"),
        ("steering.actuators.nexthops", "pytools.agent.loop"),
        ("pytools.newcomer", "pytools.errors"),
    ],
)
def test_a_wrong_import_is_seen(module: str, used: str) -> None:
    assert list(complaints(module, used))


def test_relative_and_nested_imports_are_seen() -> None:
    source = "from . import maps\nfrom ...views import top\ndef f():\n    import pyroute2.netlink\n"
    assert list(imports(source, "pytools.kernel.bpf.loader", False)) == [
        "pytools.kernel.bpf.maps",
        "pytools.views.top",
        "pyroute2.netlink",
    ]
