"""NCCL's profiler plugin: what each collective of a job waits for, read from the ring that the plugin fills."""
