"""Probes: every path to every peer is probed, the peers' probes are answered, and delays come of it."""
