"""The streams that a simulated task reads, as `rekindle.task.stream_inputs`: readers around the
streams of its core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rekindle.consistency.messages import ReadLive, ResumeStable, StopLive
from rekindle.exchange.routing import partitions_read
from rekindle.protocol import Endpoint, Upstream
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch
from rekindle.streams.reader_core import Subscription
from rekindle.streams.sunion import Channel
from rekindle.streams.wire import StreamProgress
from rekindle.task.core.streams import InputEvent, StreamsCore
from rekindle.task.core.upstreams import UpstreamReports
from rekindle.topology.model import Segment
from rekindle_testing.simulation.network import Network
from rekindle_testing.simulation.reading import Listener, SimulatedReader
from rekindle_testing.simulation.scheduler import SimulatedProcess

READ_AHEAD_BYTES = 1 << 20
_EARLY_EVENTS = 64
"""How many events of all channels are kept before the task is restored."""


@dataclass(slots=True)
class Announced:
    """A tentative epoch that a replica which is read has put out, and that has not arrived.
    `since`: when a response first said so; `times`: how many have said so since then."""

    epoch: int
    since: float
    times: int = 0


class SimulatedStreams:
    """`feed` gives an event to the core, with the batch that it has; `core`: once it is
    restored."""

    def __init__(
        self,
        process: SimulatedProcess,
        network: Network,
        segment: Segment,
        partition: int,
        next_epoch: int,
        epoch_interval_s: float,
        may_be_tentative: bool,
        feed: Callable[[InputEvent, EpochBatch | None], None],
        core: Callable[[], StreamsCore | None],
    ) -> None:
        self._process = process
        self._network = network
        self._segment = segment
        self._epoch_interval_s = epoch_interval_s
        self._may_be_tentative = may_be_tentative
        self._feed = feed
        self._core = core
        # Until the task is restored.
        self._early: list[tuple[InputEvent, EpochBatch | None]] | None = []
        self._wake_needed = False
        self._endpoints: dict[tuple[str, int], tuple[Endpoint, ...]] = {}
        channels = [
            Channel(index, read)
            for index, entry in enumerate(segment.inputs)
            for read in sorted(partitions_read(entry, partition))
        ]
        self._reports = UpstreamReports({c: segment.inputs[c.input].stream for c in channels})
        self._readers = {c: self._reader(c, next_epoch, live=False) for c in channels}
        self._live_readers: dict[Channel, SimulatedReader] = {}
        self._newest = dict.fromkeys(channels, NO_EPOCH)
        self.announced: dict[Channel, Announced] = {}

    def _reader(self, channel: Channel, from_epoch: int, *, live: bool) -> SimulatedReader:
        stream = self._segment.inputs[channel.input].stream
        listener = Listener(
            partial(self._has_space, channel, live),
            partial(self._arrived, channel, live),
            partial(self._progressed, channel, live),
            self._call_ended,
        )
        subscription = Subscription(stream, channel.partition, from_epoch, live=live)
        return SimulatedReader(
            self._process, self._network, subscription, self._epoch_interval_s, listener
        )

    # -- what comes --------------------------------------------------------------------------------

    def _arrived(self, channel: Channel, live: bool, batch: EpochBatch) -> None:
        if not live or channel in self._live_readers:
            if batch.kind in (BatchKind.STABLE, BatchKind.TENTATIVE):
                self._newest[channel] = max(self._newest[channel], batch.epoch)
            self._pass_on(
                lambda inputs, now: inputs.batch_received(channel, batch, now, live=live), batch
            )

    def _progressed(self, channel: Channel, live: bool, progress: StreamProgress) -> None:
        if not self._may_be_tentative:
            return
        if live or channel not in self._live_readers:  # they may read different replicas
            self._note_announced(channel, progress)
        for event in self._reports.receive(channel, progress, live=live):
            self._pass_on(event)

    def _note_announced(self, channel: Channel, progress: StreamProgress) -> None:
        report = progress.live
        newest = NO_EPOCH if report is None else report.newest_tentative
        known = self.announced.get(channel)
        if newest <= self._newest[channel] or (known is not None and newest < known.epoch):
            self.announced.pop(channel, None)
        elif known is None:
            self.announced[channel] = Announced(newest, self._process.scheduler.now)
        else:
            known.times += 1

    def _pass_on(self, event: InputEvent, batch: EpochBatch | None = None) -> None:
        if self._early is not None:
            self._early.append((event, batch))
        else:
            self._feed(event, batch)

    def restored(self) -> None:
        """The core has its streams."""
        if self._early is None:
            return
        early, self._early = self._early, None
        for event, batch in early:
            self._feed(event, batch)
        self._wake_all()

    def _has_space(self, channel: Channel, live: bool) -> bool:
        core = self._core()
        if self._early is not None or core is None:
            has_space = len(self._early or ()) < _EARLY_EVENTS
        else:
            has_space = core.may_read(channel, live)
        self._wake_needed |= not has_space
        return has_space

    # -- what the core wants -----------------------------------------------------------------------

    def perform(self, effect: ReadLive | StopLive | ResumeStable) -> None:
        match effect:
            case ReadLive(channel, from_epoch):
                self._reports.live_began(channel)
                self.announced.pop(channel, None)
                reader = self._live_readers[channel] = self._reader(channel, from_epoch, live=True)
                key = reader.subscription.stream, channel.partition
                reader.route(self._endpoints.get(key, ()))
                self._wake_needed = True  # the new reader has to be woken once
            case StopLive(channel):
                self._reports.live_ended(channel)
                self._live_readers.pop(channel).close()
            case ResumeStable():
                self._wake_needed = True

    def offer_space(self) -> None:
        """After each step of the core: wake the readers that wait for space, soon."""
        if self._wake_needed:
            self._wake_needed = False
            self._process.after(0.0, self._wake_all)

    def _wake_all(self) -> None:
        for reader in self._all_readers():
            reader.wake()

    def _call_ended(self) -> None:
        self._wake_all()

    def _all_readers(self) -> list[SimulatedReader]:
        return [*self._readers.values(), *self._live_readers.values()]

    # -- what others ask ---------------------------------------------------------------------------

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(reader.core.head for reader in self._readers.values())

    def head(self) -> int:
        return min(self.heads)

    def better_replicas(self) -> frozenset[str]:
        """Replicas that should be read instead of those that are."""
        found = {reader.better_replica() for reader in self._all_readers()}
        return frozenset(address for address in found if address is not None)

    def route(self, upstreams: Sequence[Upstream]) -> None:
        for upstream in upstreams:
            self._endpoints[upstream.stream, upstream.partition] = upstream.endpoints
            for reader in self._all_readers():
                subscription = reader.subscription
                key = subscription.stream, subscription.partition
                if key == (upstream.stream, upstream.partition):
                    reader.route(upstream.endpoints)
        self._wake_all()
