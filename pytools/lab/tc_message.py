"""The header of traffic control's netlink messages, the same for queues and for filters. Pure: no socket."""

from __future__ import annotations


class TrafficControl:
    """`struct tcmsg`, to be inherited beside `nlmsg` by a message that adds its attributes.

    Not a message itself: what inherits from one is given the attribute table that was compiled for it.
    """

    prefix = "TCA_"
    fields = (
        ("family", "B"),
        ("pad1", "B"),
        ("pad2", "H"),
        ("index", "i"),
        ("handle", "I"),
        ("parent", "I"),
        ("info", "I"),
    )
