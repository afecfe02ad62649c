"""Keeps pandas from being imported. Import this first.

pyarrow and PySpark import pandas if it is installed, and a task does not use it: it would cost each
task a second of CPU at its start, and 40 MiB of memory.
"""

import sys
from importlib.abc import MetaPathFinder


class _PandasBlocker(MetaPathFinder):
    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is blocked in tasks", name=fullname)


sys.meta_path.insert(0, _PandasBlocker())
