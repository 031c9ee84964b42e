"""Turn an `Analysis` into the sentences of the answer.

In: an `Analysis`. Out: sentences. No module of this package imports tables or figures.
"""
