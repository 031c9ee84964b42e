"""Decode and resize JPEG images on the GPU.

In: encoded batches. Out: uint8 image batches on the device. Only the nvJPEG decoders and device augmentation use it.
"""
