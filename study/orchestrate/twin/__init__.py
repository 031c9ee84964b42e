"""Replace the Ray cluster in tests and benchmarks.

In: planned trials, and a function or local processes as ranks. Out: `TrialResult`s, without Ray.
"""
