"""Probing: probes every path to every peer, answers the peers' probes, and computes delays."""
