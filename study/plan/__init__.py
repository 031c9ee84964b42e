"""Plan a study.

In: a `Study`, nodes and recorded trials. Out: planned trials with placement, order, time and cost.
"""
