"""Proof: the silent port of an active-backup bond is left, and put back by whoever ends (_bonds_undone.py), also with
agents as shipped (_bond_agents.py).

    python tests/prove/bonds.py [--packages DIR] [--limit 1800]

The machine's own kernel may have no bonds: it runs in the newest kernel of Debian 12's backports, in the emulator.
Prints JSON Lines; exits with 1 if it does not pass. Run as root, from the checkout.
"""

from __future__ import annotations

import sys

import _other_kernel

TESTS = (
    "tests/prove/_bond_agents.py::test_a_silent_port_is_left_and_put_back",
    "tests/prove/_bonds_undone.py::test_the_former_port_is_put_back_by_the_controller_or_its_guardian[15]",
    "tests/prove/_bonds_undone.py::test_the_former_port_is_put_back_by_the_controller_or_its_guardian[9]",
    "tests/prove/_bonds_undone.py::test_if_both_are_killed_the_port_stays_until_steer_off",
)

if __name__ == "__main__":
    sys.exit(_other_kernel.prove(__file__, "bookworm-backports", (6, 2), lambda: TESTS))
