"""Store results.

In: `TrialResult`s. Out: a results folder that survives a kill at any moment.
"""
