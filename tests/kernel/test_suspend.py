"""Orders on disk as another process reads them after a suspend: a time namespace whose CLOCK_BOOTTIME is ahead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import support

from steering import elapsed
from steering.control import kept_orders
from steering.deciding.overrides import Override, Overrides

SECOND = 10**9
READ = (
    "import sys; from pathlib import Path; from steering import elapsed; from steering.control import kept_orders;"
    "print(len(kept_orders.load(Path(sys.argv[1]), elapsed.moment()).orders))"
)


@pytest.mark.parametrize(("slept_s", "left"), [(3000, 1), (4000, 0)])
def test_an_order_ends_while_the_host_sleeps(tmp_path: Path, slept_s: int, left: int) -> None:
    if not Path("/proc/self/ns/time").exists():
        pytest.skip("missing: time namespaces")
    kept_orders.save(tmp_path, Overrides((Override("hold").lasting(3600 * SECOND, elapsed.moment()),)))
    asleep = ["unshare", "--time", "--fork", "--boottime", str(slept_s), "--monotonic", "0"]
    done = support.run([*asleep, sys.executable, "-c", READ, str(tmp_path)], cwd=support.ROOT)
    assert int(done.stdout) == left
