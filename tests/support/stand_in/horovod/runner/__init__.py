"""Part of the stand-in for Horovod."""
