"""Messages between processes and hosts: the agent socket, lent maps, signed messages between agents."""
