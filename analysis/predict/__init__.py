"""Predict sizes that were not measured.

In: an `Analysis`. Out: fitted laws and forecasts with held-out errors.
"""
