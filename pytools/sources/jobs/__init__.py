"""Jobs of many ranks: which processes of this host belong to them, what they send, and who is behind."""
