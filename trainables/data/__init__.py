"""Load batches.

In: a `Trial`. Out: a `DataSource` and its batches.
"""
