"""Time a trial on one rank.

In: a `Trial`. Out: rows of labelled windows, gradient buckets and the all-reduce sweep.
"""
