"""What the lab commands refuse before they touch anything."""

import pytest
from click.testing import CliRunner

from pytools.errors import CapabilityError, UsageError
from pytools.lab import Lab, Spec, building, cli, faults


def refused(*words):
    result = CliRunner().invoke(cli.lab, list(words))
    assert result.exception is not None, result.output
    return result.exception


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["up", "--name", "../x"], "is no name for a lab"),
        (["up", "--hosts", "1"], "hosts is 1"),
        (["up", "--rate", "fast"], "is no rate"),
        (["show", "--name", "not-there"], "there is no lab not-there"),
        (["congest", "--rail", "1"], "nothing to change"),
        (["congest", "--rail", "1", "--rate", "1mbit", "--toward", "two"], "'two' is no host"),
        (["blackhole", "--rail", "1", "--name", "not-there"], "there is no lab not-there"),
        (["up", "--share", "h1,h2"], "share one anyway"),
        (["up", "--clocks", "1", "--share", "h1,two"], "'two' is no host"),
        (["up", "--clocks", "1", "--share", "h1,h9"], "cannot share oscillators"),
        (["up", "--clocks", "-1"], "seed is -1"),
        (["clock", "--host", "h1"], "a host and a size"),
        (["clock", "--step", "1ms"], "a host and a size"),
        (["clock", "--name", "not-there"], "there is no lab not-there"),
        (["delay", "--rail", "1", "--direction", "h1", "--us", "5"], "'h1' is no direction"),
        (["bursts", "--rail", "1", "--share", "0.4", "--name", "not-there"], "there is no lab not-there"),
        (["mark", "--rail", "1", "--name", "not-there"], "there is no lab not-there"),
        (["mtu", "--rail", "1", "--bytes", "1400", "--name", "not-there"], "there is no lab not-there"),
        (["cut", "--rail", "1", "--name", "not-there"], "there is no lab not-there"),
        (["cut", "--rail", "1", "--host", "two"], "'two' is no host"),
        (["kill-host", "--host", "two"], "'two' is no host"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_to_do(words, says):
    error = refused(*words)
    assert isinstance(error, UsageError)
    assert says in error.what
    assert error.next_step


@pytest.mark.parametrize("text", ["h1", "h1:x", "h0:h1", ":"])
def test_a_direction_is_two_hosts(text):
    with pytest.raises(UsageError):
        cli.direction_of(text)


def test_a_direction_is_read():
    assert cli.direction_of("h1:h12") == (1, 12)
    assert cli.direction_of("3:4") == (3, 4)


@pytest.mark.parametrize("every", [0, -1, 1_000_001])
def test_marks_are_of_every_so_manieth(every):
    with pytest.raises(UsageError, match="cannot be marked"):
        faults.mark(Spec("x"), 1, every, None)


@pytest.mark.parametrize("mtu_bytes", [0, 1279, 65_536])
@pytest.mark.parametrize("silent", [False, True])
def test_an_mtu_is_one_that_both_families_can_have(mtu_bytes, silent):
    with pytest.raises(UsageError, match="out of range"):
        faults.narrow(Spec("x"), 1, mtu_bytes, silent, None)


def test_without_root_nothing_is_begun(monkeypatch, tmp_path):
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(building.os, "geteuid", lambda: 1000)
    with pytest.raises(CapabilityError, match="run as root"):
        Lab.up("x")
    assert not (tmp_path / "run").exists()
