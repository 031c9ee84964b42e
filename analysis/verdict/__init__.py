"""State what an `Analysis` means.

In: an `Analysis`. Out: sentences; no module here imports tables or figures.
"""
