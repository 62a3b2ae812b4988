"""The flight recorder: what the agent told in the last hours, in a bounded set of files that outlives it."""
