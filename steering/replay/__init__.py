"""A policy over recorded signals: what it would have done, with the real engine and a kernel that is made up."""
