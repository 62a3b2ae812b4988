"""GPUs of this host: what NVML says of them, and their timers against the host's clock."""
