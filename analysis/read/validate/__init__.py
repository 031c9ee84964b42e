"""Validate a results folder at the door, so that nothing behind it needs defences: the folder may be somebody else's.

In: the bytes of JSON files, and frames of Parquet files. Out: typed records, and one line per damaged trial.
"""
