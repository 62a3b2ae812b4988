"""`swerve doctor`: what this host can do, what is missing, what each gap costs and how to mend it; support bundles.

checks.py is the table of what is looked at; agent.py, kernel.py and devices.py find it, by trying
(pytools/kernel/features.py), never by a version number; report.py prints it, and cleans up.
"""
