"""The pictures in docs/ show the live view as it is."""

from __future__ import annotations

import pytest
from support import ROOT
from top_pictures import PICTURES, picture, words


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_up_to_date_and_loads_nothing(name: str) -> None:
    kept, made = (ROOT / "docs" / name).read_text(), picture(name)
    assert words(kept) == words(made), "make it anew: .venv/bin/python tests/top_pictures.py"
    assert "swerve h1" in " ".join(words(kept))
    assert "url(" not in kept.replace("url(#", "") and "http" not in kept.replace("http://www.w3.org/2000/svg", "")
    assert f"]({name})" in (ROOT / "docs" / "top.md").read_text()
