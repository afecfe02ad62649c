"""Imported first: pyarrow and PySpark import pandas wherever they find it, and a task uses none.

It would cost each task a second of CPU at its start, and 40 MiB for ever.
"""

import sys
from importlib.abc import MetaPathFinder


class _NotInstalled(MetaPathFinder):
    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a task has no pandas", name=fullname)


sys.meta_path.insert(0, _NotInstalled())
