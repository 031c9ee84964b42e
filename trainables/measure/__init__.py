"""Time a trial on one rank.

In: a `Trial`. Out: rows of timed steps, gradient buckets and the all-reduce sweep.
"""
