"""What must hold of the calls of one reader.

Design: docs/design/streams.md#reader.
"""

from __future__ import annotations

from math import inf

from rekindle.protocol import Endpoint
from rekindle.streams.replica_choice import FAILURE_MEMORY_S
from rekindle_testing.simulation.checks import Violation

_LONGEST_BACKOFF_S = 2.0

_Replica = tuple[str, int]  # address, incarnation


class ReaderChecks:
    """After a call has failed, the next one is not to the same replica if there is another one
    that was routed all the time, was not suspected, and has failed no call lately."""

    def __init__(self, reader: str) -> None:
        self._reader = reader
        self._routed: dict[_Replica, Endpoint] = {}
        self._failed_at: dict[_Replica, float] = {}
        self._failed: _Replica | None = None  # the last call was to this one, and failed
        self._others: set[_Replica] = set()  # which could have been called ever since

    def routes_changed(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._routed = {(e.address, e.incarnation): e for e in endpoints}
        if self._failed not in self._routed:
            self._failed = None
        self._others &= self._not_suspected()

    def called(self, address: str, now: float) -> None:
        failed, self._failed = self._failed, None
        if failed is None or failed[0] != address or not self._others:
            return
        if now - self._failed_at[failed] < FAILURE_MEMORY_S:
            others = ", ".join(sorted(other for other, _ in self._others))
            raise Violation(
                f"{self._reader} calls {address} again, where its last call has failed, and "
                f"not {others}"
            )

    def returned(self) -> None:
        self._failed = None

    def failed(self, address: str, now: float) -> None:
        self._failed = next((r for r in self._routed if r[0] == address), None)
        if self._failed is not None:
            self._failed_at[self._failed] = now
        lately = now - _LONGEST_BACKOFF_S
        self._others = {
            replica
            for replica in self._not_suspected()
            if self._failed_at.get(replica, -inf) < lately
        }

    def _not_suspected(self) -> set[_Replica]:
        return {replica for replica, endpoint in self._routed.items() if not endpoint.suspected}
