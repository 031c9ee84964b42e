"""Run planned trials on a Ray cluster.

In: planned trials. Out: `TrialResult`s. This is the only package that imports ray.
"""
