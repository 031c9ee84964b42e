"""One architecture a file.

A model of images is a function `(classes, channels, image_size) -> nn.Module` from images [n, channels, image_size,
image_size] to logits [n, classes]; a model of text is a function `(vocabulary, trial) -> nn.Module` from tokens [n, t] to
logits [n, t, vocabulary] of the token that follows each.
"""
