"""Shared parts of the benchmarks: bare loops, interleaving, and how a result is written."""
