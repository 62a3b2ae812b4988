"""Metrics for Prometheus (docs/metrics.md).

command.py is the edge: signals from the agent in, answers to a server's threads out (server.py). model.py keeps what
was told, in the parts of parts.py; what signals say of each metric is in counting.py and series.py,
its name and help in families.py. The model is pure: time is passed in.
"""
