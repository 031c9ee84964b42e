"""Ray's processes on this host: end those that are left, notice when one dies, and keep their output apart.

In: a connected cluster. Out: context managers for the duration of a run.
"""
