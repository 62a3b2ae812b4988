"""The agent: one process per network namespace that runs the sources and serves their signals."""
