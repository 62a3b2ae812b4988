"""What people and programs read: tables, JSON, the live view, the host report."""
