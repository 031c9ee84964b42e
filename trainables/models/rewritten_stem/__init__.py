"""Rewrite ResNet's first layers for GPUs (`Trial.rewritten_stem`).

In: a ResNet. Out: the same function of its input, in forms that compile to faster kernels.
"""
