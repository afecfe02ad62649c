"""The directory of a run outside pytest: removed at its end, kept with its evidence on failure."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_run_directory(name: str) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=f"rekindle-{name}-"))
    try:
        yield directory
    except BaseException:
        print(f"kept for a look at the failure: {directory}")
        raise
    shutil.rmtree(directory)
