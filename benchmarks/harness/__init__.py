"""Shared parts of the benchmarks: bare loops, interleaved runs, and writing results."""
