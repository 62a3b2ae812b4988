"""The live view (docs/top.md).

live.py is the edge: it chooses between the application (app.py) and the plain report (plain.py). feed.py reads the
agent, state.py keeps what was told in rings and sums; page.py draws a frame of it, with the panels of paths.py and
lists.py. All but the edge and the application are pure: time and size of the screen are passed in.
"""
