"""Compare configurations: speed-up, efficiency, accuracy and cost.

In: frames of measures. Out: ratios with intervals.
"""
