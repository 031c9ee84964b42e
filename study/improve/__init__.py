"""Measured advice: changes of a training (levers), tried in turn with it, combined and verified.

In: a results folder or the options of a run. Out: a results folder whose study.json says what each change gained.
"""
