"""`rekindle warm-up`: creates the archive of Spark's classes that `rekindle run` uses."""

from __future__ import annotations

import argparse
import os
import sys

EXAMPLES = """\
  rekindle warm-up
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no arguments: the archive is for the installed Java and Spark, in the user's
    cache."""


def run(args: argparse.Namespace) -> int:
    print("creating the archive of Spark's classes if there is none (30 s)", file=sys.stderr)
    from rekindle.directories import cache_root
    from rekindle.engine.spark.archive_cache import ARCHIVE_DIRECTORY, ensure_archive

    print(ensure_archive(cache_root(os.environ) / ARCHIVE_DIRECTORY))
    return 0
