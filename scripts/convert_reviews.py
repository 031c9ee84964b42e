"""Converts a folder of Amazon reviews ahead of a study, whose first trial would else wait for it within its time limit.

    python -m scripts.convert_reviews --source DIR

DIR is what the study gets as --data-dir. Every host converts for itself unless they share the cache folder.
"""

import argparse
import sys
from pathlib import Path

from trainables.data.amazon_reviews import converted
from trainables.data.source import DataError


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, type=Path, metavar="DIR")
    try:
        path = converted(parser.parse_args().source)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
