"""A policy file: read safely, checked whole, and every fault named with its line.

Does I/O only in `load`; `parse` is pure. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from pytools.directories import page, read_obeyed
from pytools.errors import PolicyError, UsageError, not_permitted
from pytools.yaml_reader import NotYamlError, Problem, Reader, decoded
from steering.policy.consistency import inconsistencies
from steering.policy.model import Policy
from steering.policy.validation_errors import follows, problem_of

MAX_BYTES: Final = 1 << 20


class InvalidPolicyError(PolicyError):
    """All faults of a policy file, one a line."""

    def __init__(self, path: str, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(problem.text(path) for problem in self.problems))


def load(path: Path, *, guarded: bool = True) -> Policy:
    """The policy in a file.

    Parameters
    ----------
    guarded : bool
        Refuse a file that somebody else could have written. Only for explaining is this not needed.

    Raises
    ------
    CapabilityError
        If this user may not read it.
    UsageError
        If it cannot be read for another reason.
    InvalidPolicyError
        If it is not a policy; carries every fault.
    RefusedError
        If others could write it.
    """
    try:
        data = read_obeyed(path, MAX_BYTES + 1, guarded=guarded)
    except PermissionError as error:
        raise not_permitted(error, path) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", f"name a policy file ({page('policy.md')})") from None
    if len(data) > MAX_BYTES:
        raise PolicyError(f"{path}: larger than {MAX_BYTES} bytes", "a policy is a page of text")
    try:
        return parse(decoded(data), str(path))
    except NotYamlError as error:
        raise InvalidPolicyError(str(path), [Problem(error.line, "", str(error))]) from None


def parse(text: str, path: str = "policy") -> Policy:
    """The policy in a text.

    Raises
    ------
    InvalidPolicyError
        If it is not a policy; carries every fault, not only the first.
    """
    reader = Reader()
    try:
        raw = reader.read(text)
    except NotYamlError as error:
        raise InvalidPolicyError(path, [Problem(error.line, "", f"not a policy: {error}")]) from None
    problems = [*reader.problems, *inconsistencies(raw, reader)]
    try:
        policy = Policy.model_validate(raw)
    except ValidationError as error:
        problems += [problem_of(f, raw, reader) for f in error.errors(include_url=False) if not follows(f)]
        raise InvalidPolicyError(path, problems) from None
    if problems:
        raise InvalidPolicyError(path, problems)
    return policy
