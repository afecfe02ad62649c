"""Reads the keys of Secrets, which a pod has as files.

They are read where they are used, and are in no argument, variable, log or message.
"""

from __future__ import annotations

import os
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.names import SECRETS_MOUNT

DIRECTORY_VARIABLE = "REKINDLE_SECRETS"
"""Another directory of Secrets, such as that of `rekindle run`."""


class SecretIncomplete(RekindleError):
    """A Secret, or a key of one, is missing; names both."""


class SecretFiles:
    """The keys of one Secret, as they are now: they are replaced while the pod runs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._directory = Path(os.environ.get(DIRECTORY_VARIABLE) or SECRETS_MOUNT) / name

    def path(self, key: str) -> Path:
        """Raises SecretIncomplete."""
        path = self._directory / key
        if not path.is_file():
            keys = [p.name for p in self._directory.glob("*") if p.is_file()]
            has = f"it has {', '.join(sorted(keys))}" if keys else f"{self._directory} is empty"
            raise SecretIncomplete(f"Secret {self._name} has no key {key} ({has})")
        return path

    def text(self, key: str) -> str:
        """Without line ends at its end. Raises SecretIncomplete."""
        try:
            return self.path(key).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            # The message must not have the text.
            what = f"Secret {self._name}: key {key} cannot be read: {type(error).__name__}"
            raise SecretIncomplete(what) from None

    def has(self, key: str) -> bool:
        return (self._directory / key).is_file()
