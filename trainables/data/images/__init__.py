"""Load images from folders, LMDB files and Arrow files.

In: an image folder in one of its storage formats. Out: uint8 image batches.
"""
