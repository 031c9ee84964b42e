"""Check measured steps and trials for artefacts.

In: trials and step shapes. Out: `Finding`s.
"""
