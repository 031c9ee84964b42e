"""Define the named studies.

In: CPUs and GPUs per node. Out: a `Study`.
"""
