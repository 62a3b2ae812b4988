"""Clocks: how every host's clock runs, from the coded probes, and who is told."""
