"""A leaf-spine fabric in network namespaces: for the demo, the tests and the benchmarks."""

from pytools.lab.fabric import Lab
from pytools.lab.topology import Host, Rail, Spec

__all__ = ["Host", "Lab", "Rail", "Spec"]
