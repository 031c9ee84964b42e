"""Define the networks.

In: the number of classes, or the vocabulary and the trial. Out: a `torch.nn.Module` with random weights.
To add a model: one module here and one line in `trainables.registry`.
"""
