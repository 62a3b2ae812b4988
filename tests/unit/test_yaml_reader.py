"""A configuration that is no YAML, or YAML that is no value: an error of one line that says where, never a traceback.

On SIGHUP an agent that runs reads its file again: what the loader does not turn into such an error ends it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools import config
from pytools.errors import UsageError
from pytools.yaml_reader import NotYamlError, Reader, decoded
from steering.policy import file as policy_file
from steering.policy.file import InvalidPolicyError

PEERS = b"peers: [{name: h2, address: 10.9.0.2}]\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"host: [a\nb: c\n", r":2: expected ',' or '\]'"),
        (b"host:\n\t- a\n", ":2: found character"),
        (b"# x\nhost: \xe9\n", ":2: not UTF-8 text"),
        (b"# x\nhost: \x01\n", ":2: unacceptable character #x0001"),
        (b"host: a\n---\nhost: b\n", ":2: but found another document"),
        (b"host: !nobody x\n", ":1: host: tag !nobody"),
        (b"[1]: 2\n", ":1: Object contains unknown field `\\?`"),
        (b"!!map [a]\n", ":1: Expected `object`, got `array`"),
        (b"host: 2026-02-30\n", ":1: host: not a value: day"),
        (b"host: !!bool maybe\n", ":1: host: not a value: 'maybe'"),
        (b"host: !!timestamp x\n", ":1: host: not a value"),
        (b"[" * 5_000, ":1: nested too deeply"),
        (b"a: &a [*a]\n", ":1: nested too deeply"),
        (b"a: &a {<<: *a}\n", ":1: nested too deeply"),
        (b"a: &a [1]\n<<: *a\n", ":2: <<: expected mappings"),
        (b"host: a\n" + PEERS + b"host: b\n", ":3: host: given twice, first in line 1"),
        (b"host: a\n" + PEERS + b"probe: {flows: 2, flows: 4}\n", r":3: probe\.flows: given twice"),
        (b"host: a\n" + PEERS + b'bus: {key_file: "/a\\ud800\\n"}\n', ":3: bus.key_file is"),
        (b"host: a\n" + PEERS + b"probe: {port: x}\n", r":3: probe\.port: Expected `int`"),
        (b"host: a\n" + PEERS + b"probe:\n  interval: 20\n", r":4: probe\.interval: expected a number with its unit"),
        (b"host: a\n" + PEERS + b"probe:\n  interval: 0ms\n", r":4: probe\.interval is 0s, must be within 1ms and 1m"),
        (b"host: a\n" + PEERS + b"probe:\n  interval_ms: 0\n", r":4: probe\.interval is 0s, must be within"),
        (b"host: a\n" + PEERS + b"probe: {interval_ms: 5, interval: 5ms}\n", ":3: probe.interval_ms: given twice"),
        (b"host: a\n" + PEERS + b"clocks:\n  tolerance: 1.5us\n  window: 1ms\n", r":5: clocks\.window is 1ms"),
        (b"host: a\npeers:\n- name: h2\n  address: ''\n", ":4: peer h2: '' is not an IP address"),
        (b"host: a\npeers:\n- name: h2\n  address: 4\n", r":4: peers\[0\]\.address: Expected `str`"),
    ],
)
def test_it_is_one_line(tmp_path: Path, text: bytes, says: str) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "agent.yaml"
    file.write_bytes(text)
    with pytest.raises(UsageError, match=says) as raised:
        config.load(file)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"{file}:")


@pytest.mark.parametrize("value", ["!!bool maybe", "!!timestamp x"])
def test_a_policy_says_so_too(value: str) -> None:
    with pytest.raises(InvalidPolicyError, match="not a value"):
        policy_file.parse(f"version: {value}\n")


def test_what_is_merged_may_be_given_anew() -> None:
    assert Reader(aliases=True).read("a: &a {x: 1}\nb: {<<: *a, x: 2}\n") == {"a": {"x": 1}, "b": {"x": 2}}


@given(st.booleans(), st.one_of(st.binary(), st.text("{}[]:-!&*#|>'\"%@`,\n\t ab1.0=<~?").map(str.encode)))
def test_whatever_it_is(aliases: bool, text: bytes) -> None:
    try:
        Reader(aliases).read(decoded(text))
    except NotYamlError as error:
        assert len(str(error).splitlines()) <= 1
        assert 1 <= error.line <= len(text.splitlines()) + 2


def test_what_a_small_file_stands_for_is_limited() -> None:
    ten = (", ".join([f"*a{n - 1}"] * 10) for n in range(1, 12))
    laughs = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{each}]\n" for n, each in enumerate(ten, 1))
    with pytest.raises(NotYamlError, match="too large"):
        Reader(aliases=True).read(laughs)


def test_of_what_is_merged_the_first_holds() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc: {<<: [*a, *b], y: 3}\n"
    assert Reader(aliases=True).read(text)["c"] == {"x": 1, "z": 2, "y": 3}
