"""Plan a study.

In: a `Study`, nodes and recorded trials. Out: planned trials, their placement, order, time and cost.
"""
