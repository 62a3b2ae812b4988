"""Interfaces that carry paths: what the kernel and the drivers tell of them, and RDMA ports."""
