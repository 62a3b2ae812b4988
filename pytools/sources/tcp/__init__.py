"""TCP by cause: what the kernel programs aggregate, as signals."""
