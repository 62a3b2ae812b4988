"""One rank of a training job, as far as the network sees it: all-reduces one after the other, by NCCL over TCP.

    python bench/_nccl_job.py RANK RANKS ADDRESS BYTES

Runs without swerve's packages, where PyTorch is. Each rank has the GPU of its number; rank 0 listens at ADDRESS. Prints
a line for each all-reduce: when it ended and how long it took, nanoseconds of CLOCK_MONOTONIC. Ends with SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]

PORT = 29_500


def main(rank: int, ranks: int, address: str, size_bytes: int) -> None:
    """Run until asked to end."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # a collective that waits for its peer is not waited for
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=ranks)
    data = torch.ones(size_bytes // 4, device="cuda")
    while True:
        began_ns = time.monotonic_ns()
        dist.all_reduce(data, op=dist.ReduceOp.MAX)
        torch.cuda.synchronize()
        ended_ns = time.monotonic_ns()
        print(ended_ns, ended_ns - began_ns, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
