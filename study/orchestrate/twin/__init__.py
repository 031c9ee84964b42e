"""Stand in for the Ray cluster in tests and benchmarks.

In: planned trials, and a function or local processes that play the ranks. Out: `TrialResult`s, without Ray.
"""
