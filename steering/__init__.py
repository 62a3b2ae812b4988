"""DECIDE and ACT: signals to plans, plans to kernel changes that are leased, journalled and explained."""
