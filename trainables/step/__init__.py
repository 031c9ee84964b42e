"""Take one optimizer step.

In: a batch. Out: updated weights, and clock marks if the step is timed.
"""
