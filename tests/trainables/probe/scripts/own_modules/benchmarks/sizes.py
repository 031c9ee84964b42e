"""In a folder without `__init__.py`, whose name is that of a package of the project."""

SAMPLES = 80
