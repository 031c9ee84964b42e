"""Define the named studies.

In: what the machine has. Out: a `Study`.
"""
