"""A configuration that is no YAML, or YAML that is no value: an error of one line that says where, never a traceback.

On SIGHUP an agent that runs reads its file again: what the loader does not turn into such an error ends it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools import config, yaml_text
from pytools.errors import UsageError
from steering.policy import file as policy_file
from steering.policy.file import InvalidPolicyError

PEERS = b"peers: [{name: h2, address: 10.9.0.2}]\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"host: [a\nb: c\n", r"line 2: expected ',' or '\]'"),
        (b"host:\n\t- a\n", "line 2: found character"),
        (b"host: \xe9\n", "unacceptable character #x00e9"),
        (b"host: a\n---\nhost: b\n", "another document"),
        (b"host: !nobody x\n", "line 1: could not determine"),
        (b"[1]: 2\n", "line 1: found unhashable key"),
        (b"!!map [a]\n", "line 1: expected a mapping node"),
        (b"host: 2026-02-30\n", "line 1: '2026-02-30' is no value"),
        (b"host: !!bool maybe\n", "line 1: 'maybe' is no value"),
        (b"host: !!timestamp x\n", "line 1: 'x' is no value"),
        (b"[" * 5_000, "nested too deeply"),
        (b"host: a\n" + PEERS + b"host: b\n", "line 3: 'host' is given twice"),
        (b"host: a\n" + PEERS + b"probe: {flows: 2, flows: 4}\n", "line 3: 'flows' is given twice"),
        (b"host: a\n" + PEERS + b'bus: {key_file: "/a\\ud800"}\n', "bus.key_file is"),
        (b"host: a\n" + PEERS + b"probe: {port: x}\n", r"Expected `int`.*\$\.probe\.port"),
    ],
)
def test_it_is_one_line(tmp_path: Path, text: bytes, says: str) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "agent.yaml"
    file.write_bytes(text)
    with pytest.raises(UsageError, match=says) as raised:
        config.load(file)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"{file}: ")


@pytest.mark.parametrize("value", ["!!bool maybe", "!!timestamp x"])
def test_a_policy_says_so_too(value: str) -> None:
    with pytest.raises(InvalidPolicyError, match="not a value"):
        policy_file.parse(f"version: {value}\n")


def test_what_is_merged_may_be_given_anew() -> None:
    assert yaml_text.values(b"a: &a {x: 1}\nb: {<<: *a, x: 2}\n") == {"a": {"x": 1}, "b": {"x": 2}}


@given(st.one_of(st.binary(), st.text("{}[]:-!&*#|>'\"%@`,\n\t ab1.0=<~?").map(str.encode)))
def test_whatever_it_is(text: bytes) -> None:
    try:
        yaml_text.values(text)
    except yaml_text.NotYamlError as error:
        assert len(str(error).splitlines()) <= 1
