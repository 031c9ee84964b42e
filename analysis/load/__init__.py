"""Read a results folder.

In: a path or URI. Out: `Results`, the raw frames and what is reduced while reading. No comparison.
"""
