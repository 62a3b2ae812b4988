"""Pure functions of arrays; no I/O, no clock is read here."""
