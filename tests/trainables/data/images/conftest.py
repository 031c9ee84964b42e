"""What the tests of image folders share."""

from pathlib import Path

import pytest

from tests.support.photos import write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of small JPEG files by split and class."""
    return write_photos(tmp_path / "photos")
