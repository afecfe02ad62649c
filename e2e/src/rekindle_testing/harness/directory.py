"""The directory of a run outside pytest: deleted at its end, kept if the run fails."""

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
        print(f"the run failed; its logs and files are kept in {directory}")
        raise
    shutil.rmtree(directory)
