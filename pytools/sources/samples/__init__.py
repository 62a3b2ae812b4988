"""Samples: the same application bytes seen at both ends, and their delays."""
