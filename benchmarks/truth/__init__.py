"""Whether the numbers are true: intervals, breakdowns, predictions and faults against known answers."""
