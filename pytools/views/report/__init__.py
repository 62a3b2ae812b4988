"""The report: one self-contained page of what a recording, or a live window, holds (docs/recording.md).

reading.py is the edge: lines from files, recordings or the agent in, a page out. Between them everything is pure:
gather.py folds signals into frozen records (records.py), the sections draw these as HTML and SVG, page.py joins
them. Times are CLOCK_REALTIME nanoseconds of the hosts that published.
"""
