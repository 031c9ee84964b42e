"""Read a results folder.

In: a path or URI. Out: `Results`, with the raw frames and those reduced while reading. Nothing is compared here.
"""
