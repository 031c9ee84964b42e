"""What a user may want most of a configuration; the names of `--goal`."""

GOALS = ("throughput", "time-to-accuracy", "cost")
"""samples a second; seconds until the target accuracy; samples a GPU-hour"""
