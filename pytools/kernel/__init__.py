"""The only code that touches the kernel: programs in, descriptors, rings and maps out."""
