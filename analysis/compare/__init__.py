"""Compare configurations: each question once.

In: frames of measures. Out: ratios with intervals.
"""
