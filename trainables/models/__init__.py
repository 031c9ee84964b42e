"""One architecture a file. A model is a function `(classes, channels, image_size) -> nn.Module`."""
