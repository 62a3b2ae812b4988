"""The words of `swerve policy` and `swerve steer`."""
