"""Render an `Analysis` as figures.

In: an `Analysis`. Out: matplotlib figures; no module here imports tables or verdict.
"""
