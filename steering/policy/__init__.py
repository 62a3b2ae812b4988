"""The policy language: the model that a file becomes, reading and checking it, and saying it in words.

`file` alone does I/O. docs/policy.txt lists every key.
"""
