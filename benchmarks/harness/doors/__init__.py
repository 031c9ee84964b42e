"""One training in four forms, one per door: script, loop, train function and factory (`benchmarks/truth/doors.py`).

In: the arguments of `training.parsed`. Out: a training whose arithmetic does not depend on the door.
"""
