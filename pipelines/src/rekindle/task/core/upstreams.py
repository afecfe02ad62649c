"""Turns the responses of the replicas of each channel into events of the consistency manager. Pure.

Responses to the stable subscription contain what a channel's upstream has, and how far it has
corrected its output. The live subscription, if there is one, may read another replica; its
responses add that replica's tentative epochs.

Design: docs/design/consistency.md#in-a-task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch
from rekindle.streams.sunion import Channel
from rekindle.streams.wire import StreamProgress
from rekindle.task.core.streams import InputEvent

_NO_ROWS = pa.table({})


@dataclass(slots=True)
class _Upstream:
    """`boot`, `corrected`: the boot that is read for stable epochs, and the newest epoch through
    which it has corrected its output; `is_live`: whether there is a live subscription."""

    stream: str
    stable: int = NO_EPOCH
    tentative: int = NO_EPOCH
    live_tentative: int = NO_EPOCH
    boot: str = ""
    corrected: int = NO_EPOCH
    is_live: bool = False

    @property
    def report(self) -> tuple[int, int]:
        """The newest stable and the newest tentative epoch."""
        return self.stable, max(self.tentative, self.live_tentative)


class UpstreamReports:
    """The responses to one task. `streams`: of each channel."""

    def __init__(self, streams: Mapping[Channel, str]) -> None:
        self._upstreams = {channel: _Upstream(stream) for channel, stream in streams.items()}

    def live_began(self, channel: Channel) -> None:
        self._upstreams[channel].is_live = True

    def live_ended(self, channel: Channel) -> None:
        upstream = self._upstreams[channel]
        upstream.is_live, upstream.live_tentative = False, NO_EPOCH

    def receive(
        self, channel: Channel, progress: StreamProgress, *, live: bool
    ) -> list[InputEvent]:
        """A replica has responded; `live`: to the live subscription."""
        # The state of its output is in responses to both subscriptions.
        output, upstream = progress.live, self._upstreams[channel]
        tentative = NO_EPOCH if output is None else output.newest_tentative
        before = upstream.report
        if live:
            upstream.live_tentative = tentative if upstream.is_live else NO_EPOCH
        else:
            upstream.stable, upstream.tentative = progress.last, tentative
        events: list[InputEvent] = []
        if (report := upstream.report) != before:
            events.append(lambda inputs, now: inputs.upstream_reported(channel, *report, now))
        if output is None or live:
            return events
        if output.boot != upstream.boot:
            upstream.boot, upstream.corrected = output.boot, NO_EPOCH
        if output.corrected_through > upstream.corrected:
            upstream.corrected = output.corrected_through
            batch = EpochBatch(
                upstream.stream,
                channel.partition,
                output.corrected_through,
                watermark=0,
                rows=_NO_ROWS,
                digest="",
                kind=BatchKind.RECONCILIATION_DONE,
            )
            events.append(lambda inputs, now: inputs.batch_received(channel, batch, now))
        return events
