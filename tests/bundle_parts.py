"""What is in a support bundle."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path


def parts_of(file: Path) -> dict[str, bytes]:
    """The parts of a bundle, by name."""
    with gzip.open(file) as unpacked, tarfile.open(fileobj=unpacked) as archive:
        members = [each for each in archive.getmembers() if each.isfile()]
        return {each.name.partition("/")[2]: (archive.extractfile(each) or io.BytesIO()).read() for each in members}
