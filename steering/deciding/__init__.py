"""Facts to verdicts to states to what the weights should be. Pure: time is an argument."""
