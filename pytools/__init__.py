"""SENSE: kernel records to signals. Never imports `steering`."""
