"""Carry changes out and take them back: journal, kernel, read-back, outcome."""
