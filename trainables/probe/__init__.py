"""Time training loops that are not ours: a script, a loop or a train function, without changing it.

In: a `ScriptJob` (a fresh process per rank) or a `ProbeJob` (this process). Out: rows of timed steps and collectives.
"""

from trainables.probe.loop import steps

__all__ = ["steps"]
