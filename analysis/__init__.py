"""Data frames in, values out: measures, scaling tables, figures, the report. Imports neither torch nor ray."""
