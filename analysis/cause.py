"""The cause of a failure, without what differs between equal failures; without pandas, for the command line."""

import re

_RANK = re.compile(r"^rank \d+( on node [^:]*?)?( died)?: ")
"""Start of a reason that names the rank, see `study.orchestrate.group.WorkerGroup.rank_and_host`."""

_ADDRESS = re.compile(r"\[[\w.:%-]+\]:\d+|\b\d{1,3}(?:\.\d{1,3}){3}:\d+\b")
"""A peer as gloo or a socket names it. Its port is another one in each trial."""

_SOURCE = re.compile(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ")
"""Where in its source torch raised an error, which would fill the space for the error itself."""


def cause(reason: str) -> str:
    """Return the reason of a failure without its rank and host, the address of a peer, and a line of torch's source."""
    return _SOURCE.sub("", _ADDRESS.sub("HOST:PORT", _RANK.sub("", reason)))
