"""JSON Schema of the signals, made from their types, and what a program may rely on from one version to the next. Pure.

Within one schema version (`signals.SCHEMA_VERSION`) fields and types may come, with defaults; none goes, is renamed, or
changes its meaning, unit or type. Readers pass over fields and types that they do not know. docs/signals.md says it, a
test holds it against lines written by the first program of each version.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pytools.signals import SCHEMA_VERSION, AnySignal

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema of one line: one of the signals."""
    (found,), parts = msgspec.json.schema_components([AnySignal], ref_template="#/$defs/{name}")
    return {
        "$schema": _DIALECT,
        "$id": f"urn:swerve:signals:{SCHEMA_VERSION}",
        "title": "A signal of swerve: one line of `swerve watch`",
        **found,
        "$defs": parts,
    }
