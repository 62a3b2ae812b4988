"""The main job, shown on a lab: congestion seen, flows steered, before and after, in real packets.

Wires everything: lab, traffic (iperf3), one agent and one controller per host, and an observer that keeps the score.
"""
