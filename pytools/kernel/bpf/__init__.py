"""BPF: programs compiled, loaded and attached; maps and rings read as arrays."""
