"""One rank of a job that does as it is told, for bench/nccl_plugin.py and bench/jobs.py.

    python bench/_nccl_plugin_job.py RANK RANKS PORT

Runs without swerve's packages, where PyTorch is. Each rank has the GPU of its number; rank 0 listens on the loopback.
One command a line on standard input, one answer a line:

    time N BYTES       N all-reduces one after the other; median and 99th percentile of their times, nanoseconds
    step N BYTES LATE  N steps of one all-reduce; before each this rank sleeps for LATE microseconds
    work N BYTES MANY  N steps of one all-reduce; before each this rank multiplies MANY pairs of matrices
"""

from __future__ import annotations

import statistics
import sys
import time

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]


def main(rank: int, ranks: int, port: int) -> None:
    """Obey until standard input ends."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    data = torch.ones(64 << 20, device="cuda")
    matrix, product = torch.ones(4096, 4096, device="cuda"), torch.empty(4096, 4096, device="cuda")

    def reduce(size_bytes: int) -> int:
        began_ns = time.perf_counter_ns()
        dist.all_reduce(data[: size_bytes // 4], op=dist.ReduceOp.MAX)
        torch.cuda.synchronize()
        return time.perf_counter_ns() - began_ns

    reduce(1024)
    print("ready", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        count, size_bytes, *more = map(int, numbers)
        if what == "time":
            took = [reduce(size_bytes) for _ in range(count)]
            print(statistics.median(took), statistics.quantiles(took, n=100)[98], flush=True)
            continue
        for _ in range(count):
            if what == "work":
                for _ in range(more[0]):
                    torch.mm(matrix, matrix, out=product)
            elif more[0]:
                time.sleep(more[0] / 1e6)
            reduce(size_bytes)
        print("done", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
