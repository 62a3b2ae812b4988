"""Holding packets at the sender while a path's queue is full: the law. Pure."""
