"""Convert a folder of Amazon reviews before a study, so that its first trial need not wait within its time limit.

    python -m scripts.convert_reviews --source DIR

DIR is the study's --data-dir. Run it on every host, unless the hosts share the cache folder.
"""

import argparse
import sys
from pathlib import Path

from trainables.data.amazon_reviews import convert_reviews
from trainables.data.source import DataError


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, type=Path, metavar="DIR", help="folder of JSON Lines files")
    try:
        path = convert_reviews(parser.parse_args().source)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
