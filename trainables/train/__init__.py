"""Train a trial to a target accuracy on one rank.

In: a `Trial` with epochs. Out: rows of epochs and steps.
"""
