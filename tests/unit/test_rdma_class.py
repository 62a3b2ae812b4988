"""Why there is no RDMA: in one place, in words that name where was looked."""

from __future__ import annotations

from pathlib import Path

from support import mentions

from pytools.kernel import rdma_class


def test_why_there_is_no_rdma(tmp_path: Path) -> None:
    place = tmp_path / "infiniband"
    assert mentions(rdma_class.absent(place), "kernel", "no RDMA", str(place))
    assert rdma_class.listed(place) == []
    place.mkdir()
    assert mentions(rdma_class.absent(place), "no RDMA device", str(place), "empty")
    (place / "mlx5_0").mkdir()
    assert rdma_class.absent(place) == ""
    assert rdma_class.listed(place) == ["mlx5_0"]
