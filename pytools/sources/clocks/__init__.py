"""Clocks: the offset and drift of every host's clock, from coded probes, and who receives them."""
