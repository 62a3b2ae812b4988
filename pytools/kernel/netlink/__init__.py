"""Routing netlink: links, addresses, routes, rules, nexthops, neighbours, queue disciplines; TCP sockets."""

from __future__ import annotations

import importlib.util
import sys
import threading
from typing import Any


def _only_what_is_imported(name: str) -> None:
    """Import modules of a package without all the others that it imports for itself.

    Of pyroute2 these are 130 modules and asyncio: most of a tenth of a second of a processor, and 5 MB of every
    process of ours. They are imported once somebody asks the package itself for a name.
    """
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None or spec.loader is None:
        return
    loader, package, lock = spec.loader, importlib.util.module_from_spec(spec), threading.RLock()

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if importlib.util.find_spec(f"{name}.{attribute}") is not None:
            return importlib.import_module(f"{name}.{attribute}")
        with lock:
            if package.__dict__.pop("__getattr__", None) is not None:
                loader.exec_module(package)
        return getattr(package, attribute)

    package.__dict__["__getattr__"] = missing
    sys.modules[name] = package


_only_what_is_imported("pyroute2")
