"""Train a trial to an accuracy on one rank.

In: a `Trial` with epochs. Out: rows of epochs and steps.
"""
