"""RDMA: queue pairs seen through uprobes or the tap, what they are going through, and whom they agree to be slow."""
