"""Reduce raw rows to one row per trial or configuration.

In: `Results`. Out: frames of measures with units in their names.
"""
