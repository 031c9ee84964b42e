"""Find the Ray cluster that a command uses, without joining it.

In: --address, RAY_ADDRESS and the state of this host. Out: a `Target`, or a `ClusterError` with a fix.
"""
