"""Take one optimizer step.

In: a batch. Out: updated weights, and marks on a clock if the step is timed.
"""
