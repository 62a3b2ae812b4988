"""Routing netlink: links, addresses, routes, rules, nexthops, neighbours, queue disciplines; TCP sockets."""
