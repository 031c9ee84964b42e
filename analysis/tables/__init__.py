"""Render an `Analysis` as tables.

In: an `Analysis`. Out: `Table` values; no module here imports figures or verdict.
"""
