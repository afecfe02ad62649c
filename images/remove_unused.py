"""Removes from an image's environment what none of its processes loads.

`python remove_unused.py LIST`, with the Python of that environment. Each line of the list is a glob
below site-packages, one that ends in a slash finds directories alone; `#` begins a comment. A glob
that finds nothing fails the build: a list says what is there.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path


def parse(text: str) -> list[str]:
    """The globs of a list."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def remove(directory: Path, globs: Iterable[str]) -> list[str]:
    """Remove what the globs find below the directory; those that find nothing are returned."""
    missing = []
    for glob in globs:
        found = [path for path in directory.glob(glob) if path.is_dir() or not glob.endswith("/")]
        if not found:
            missing.append(glob)
        for path in found:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return missing


def main() -> int:
    directory = Path(sysconfig.get_path("purelib"))
    missing = remove(directory, parse(Path(sys.argv[1]).read_text()))
    for glob in missing:
        print(f"{sys.argv[1]}: nothing in {directory} is called {glob}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
