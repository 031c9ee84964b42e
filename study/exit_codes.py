"""What a command exits with."""

DONE, SOME_FAILED, USAGE, DOES_NOT_FIT, NO_CLUSTER, INTERRUPTED = 0, 1, 2, 3, 4, 130
