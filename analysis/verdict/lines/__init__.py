"""The lines of the summary card, and the configuration that they are about.

In: an `Analysis`. Out: values of `value`, from which `analysis.verdict.card` makes the card.
"""
