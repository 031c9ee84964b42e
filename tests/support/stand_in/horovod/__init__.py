"""Stands in for Horovod, which takes minutes to compile: the functions that a trial calls, over the default group.

What it cannot show is measured with the package itself: `benchmarks/results/averaging-horovod`.
"""
