"""What `swerve metrics` costs with 200 paths, scraped every five seconds: processor time, memory, what a scrape is.

The real command is attached to a real server on a Unix socket, which this process feeds with what an agent of 100 peers
over two rails would publish (_large_agent.py).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from _common import cpu_s, emit, median, note, resident_bytes
from _large_agent import FLOWS, HOSTS, RAILS, ROOT, Served

SETTLING_S, SCRAPE_EVERY_S, SCRAPES = 10.0, 5.0, 7
NETNS = "bench-metrics"
CASE = f"paths{HOSTS * RAILS}_flows{FLOWS}"


class Fed(Served):
    """An agent, and `swerve metrics` attached to it."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, NETNS, readers=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._url = f"http://{address}/metrics"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steering.cli", "metrics", "-n", NETNS, "--listen", address],
            cwd=ROOT,
            env={**os.environ, **self.places},
        )
        self.pid = self.process.pid

    def scrape(self) -> bytes:
        """All metrics, as Prometheus asks for them."""
        with urllib.request.urlopen(self._url, timeout=30) as answer:
            body: bytes = answer.read()
        return body


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="swerve-bench-") as directory, ThreadPoolExecutor(1) as reader:
        fed = Fed(directory)
        try:
            fed.work(SETTLING_S)
            shares, bodies = [], []
            for _ in range(SCRAPES):
                before, began = cpu_s(fed.pid), time.monotonic()
                published = fed.agent.published
                scrape = reader.submit(fed.scrape)
                fed.work(SCRAPE_EVERY_S)
                took = time.monotonic() - began
                shares.append((cpu_s(fed.pid) - before) / took)
                bodies.append(scrape.result(30))
                rate = (fed.agent.published - published) / took
            note(f"shares {[round(each, 3) for each in shares]}; {rate:,.0f} signals/s published")
            lines = bodies[-1].splitlines()
            emit("metrics", "cpu", median(shares), "share", "lower", case=CASE, n=SCRAPES)
            emit("metrics", "resident", resident_bytes(fed.pid) / 1e6, "MB", "lower", case=CASE)
            emit("metrics", "series", sum(not line.startswith(b"#") for line in lines), "series", "lower", case=CASE)
            emit("metrics", "scrape", len(bodies[-1]) / 1e6, "MB", "lower", case=CASE)
            emit("metrics", "lost", fed.dropped, "signals", "lower", case=CASE)
        finally:
            fed.close()


if __name__ == "__main__":
    main()
