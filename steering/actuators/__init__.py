"""Each applies a Change to one kind of kernel object, reads it back, and can undo it."""
