"""Metrics for Prometheus (docs/metrics.md).

serving.py is the edge: signals from the agent in, answers to a server's threads out (server.py). model.py keeps what
was told, in the parts of parts.py; series.py and rows.py turn it into the families of families.py. The model is pure:
time is passed in.
"""
