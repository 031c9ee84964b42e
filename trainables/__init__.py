"""What one rank does: model, data, step, timing. Imports torch, never ray; returns values, writes no results."""
