"""A fabric of hosts and rails in network namespaces: for the demo, the tests and the benchmarks."""
