"""A topology of three segments that moves state while everything fails: the real cores of donors,
newcomers, holds and the coordinator, on links that lose, delay, duplicate, reorder and damage.

`src` makes a number each epoch, `mid` folds them, `end` folds the output of `mid`. So the state and
the log of each replica are known for each epoch (`Model`). Replicas acknowledge what they have
received, which may be more than they have processed, and streams drop what all have acknowledged:
less than tasks keep today. The store is not modelled: restoring from a checkpoint
gives the expected state after the highest floor so far, and the log that consumers may need.

One step is a quarter of a second. All that is random comes from `World.random`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rekindle.backoff import BackoffPolicy
from rekindle.coordinator.checkpoints.retention import Progress
from rekindle.coordinator.model import Partition, partition_of
from rekindle.coordinator.movement.core import MovementCore, ReplicasObserved
from rekindle.coordinator.movement.session import MovementLimits
from rekindle.coordinator.movement.views import ReplicaView, ReplicaViews
from rekindle.coordinator.tasks.graph import build_graph
from rekindle.exchange.state_mover import donor as donors
from rekindle.exchange.state_mover import newcomer as newcomers
from rekindle.exchange.state_mover.chunks import Slice
from rekindle.exchange.state_mover.donor import DonorCore, DonorLimits
from rekindle.exchange.state_mover.holds import Holds
from rekindle.exchange.state_mover.messages import (
    Chunk,
    ChunkRequest,
    Directive,
    Hold,
    MessageToDonor,
    MessageToNewcomer,
    NewcomerReport,
    Offer,
    Replica,
    Session,
)
from rekindle.exchange.state_mover.newcomer import NewcomerCore, NewcomerLimits
from rekindle.protocol import TaskPhase
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment, make_topology

STEP_S = 0.25
CHUNK_BYTES = 48
CHUNKS_AT_ONCE = 3
POLL_TIMEOUT_STEPS = 4
DISCOVERY_STEPS = 12
READ_EPOCHS = 6
LIVE_WITHIN = 10

MOVEMENT = MovementLimits(
    confirm_holds_s=6.0, stall_s=6.0, session_s=30.0, attempts=2, wait_s=60.0, per_donor=1
)
DONOR = DonorLimits(chunk_bytes=64, chunks_at_once=CHUNKS_AT_ONCE, sessions=2, lease_s=8.0)
NEWCOMER = NewcomerLimits(
    chunk_bytes=CHUNK_BYTES,
    chunks_at_once=CHUNKS_AT_ONCE,
    max_damaged=4,
    retry=BackoffPolicy(0.75, 3.0),
)
LONGEST_S = MOVEMENT.wait_s + MOVEMENT.attempts * MOVEMENT.session_s
"""After this time without failures no newcomer waits or moves any more."""
REPLAY_S = 120.0
"""What replay may take after that."""

State = dict[str, str]
Log = dict[int, str]


def _mix(*parts: object) -> str:
    text = "|".join(str(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


class Model:
    """The state and the output of each segment after each epoch, without failures."""

    def __init__(self) -> None:
        self._folds: dict[str, list[str]] = {"src": [], "mid": [], "end": []}

    def _fold(self, segment: str, epoch: int) -> str:
        """What the state after an epoch depends on."""
        folds = self._folds[segment]
        while len(folds) <= epoch:
            at = len(folds)
            before = folds[-1] if folds else ""
            upstream = {"src": "", "mid": "src", "end": "mid"}[segment]
            folds.append(_mix(segment, before, self.output(upstream, at) if upstream else at))
        return folds[epoch]

    def output(self, segment: str, epoch: int) -> str:
        return _mix("output", segment, self._fold(segment, epoch))

    def state(self, segment: str, epoch: int) -> State:
        """Some keys of different sizes, all of which change with each epoch."""
        fold = self._fold(segment, epoch)
        return {f"k{i}": _mix(i, fold) * (1 + i * i % 7) for i in range(9)}


def digest_of(state: State, log: Log, epoch: int, base: int) -> str:
    return _mix(sorted(state.items()), sorted(log.items()), epoch, base)


@dataclass(slots=True)
class Snapshot:
    """What a donor has pinned: pieces that each boot puts in an order of its own."""

    epoch: int
    base: int
    pieces: list[bytes]
    digest: str


def snapshot_of(node: Node) -> Snapshot:
    assert node.epoch is not None
    log = {e: v for e, v in node.log.items() if e <= node.epoch}
    state = node.world.model.state(node.slot.segment, node.epoch)
    pieces = [f"S {key} {value}\n".encode() for key, value in state.items()]
    turn = int(_mix(node.boot), 16) % len(pieces)
    pieces = pieces[turn:] + pieces[:turn]
    pieces += [f"L {epoch} {log[epoch]}\n".encode() for epoch in sorted(log)]
    return Snapshot(node.epoch, node.base, pieces, digest_of(state, log, node.epoch, node.base))


def parse(data: bytes) -> tuple[State, Log]:
    state: State = {}
    log: Log = {}
    for line in data.decode(errors="replace").splitlines():
        kind, _, rest = line.partition(" ")
        key, _, value = rest.partition(" ")
        if kind == "S":
            state[key] = value
        elif kind == "L" and key.isdigit():
            log[int(key)] = value
    return state, log


@dataclass(frozen=True)
class Poll:
    fence: int
    number: int
    ask_only: bool = True
    directive: Directive = field(default_factory=Directive)
    floor: int | None = None
    restore: int | None = None


@dataclass(frozen=True)
class Response:
    fence: int
    number: int
    boot: str
    phase: TaskPhase
    epoch: int
    received: int
    restored_from: int | None
    newcomer: NewcomerReport
    holds: tuple[Hold, ...]
    donates: tuple[Session, ...]


@dataclass
class Node:
    """One boot of a task: its log, its inputs, and the shells of its cores."""

    world: World
    replica: Replica
    boot: str
    epoch: int | None = None
    received: int = -1
    base: int = 0
    log: Log = field(default_factory=dict)
    restored_from: int | None = None
    fence: int = 0
    frozen: bool = False
    speed: int = 2
    pace: int = 1
    holds: Holds = field(default_factory=Holds)
    donor: DonorCore | None = None
    stored: bytes = b""
    installed: tuple[State, Log] | None = None
    asked: int = 0  # chunks requested as a newcomer
    pinned: dict[Session, Snapshot] = field(default_factory=dict)
    storing: int = 0
    reading: int = 0
    inbox: list[Callable[[], None]] = field(default_factory=list)  # while it is frozen

    def __post_init__(self) -> None:
        self.newcomer = NewcomerCore(self.replica, self.boot, NEWCOMER)

    @property
    def slot(self) -> Slot:
        return self.replica.slot

    @property
    def partition(self) -> Partition:
        return partition_of(self.slot)

    @property
    def alive(self) -> bool:
        return self.world.nodes.get(self.replica) is self

    @property
    def phase(self) -> TaskPhase:
        if self.epoch is None:
            return TaskPhase.WAITING
        near = self.world.head - self.epoch <= LIVE_WITHIN
        return TaskPhase.LIVE if near else TaskPhase.CATCHING_UP

    @property
    def log_base(self) -> int:
        return min(self.log) if self.log else max(self.base, (self.epoch or -1) + 1)

    # -- the task ------------------------------------------------------------------------------

    def start(self, epoch: int, base: int, log: Log) -> None:
        self.epoch = self.received = self.restored_from = epoch
        self.base, self.log = base, log
        self.donor = DonorCore(self.replica, self.boot, epoch, DONOR)

    def run(self) -> None:
        if self.epoch is None:
            self._step_newcomer(newcomers.TimePassed())
            return
        self._receive()
        before = self.epoch
        busy = self.world.step % self.pace  # it processes what it has received in larger calls
        for _ in range(0 if busy else min(self.speed * self.pace, self.received - self.epoch)):
            self.epoch += 1
            if self.epoch >= self.base:
                self.log[self.epoch] = self.world.model.output(self.slot.segment, self.epoch)
        assert self.donor is not None
        if self.epoch > before:
            self._step_donor(donors.StateReached(self.epoch))
        self._step_donor(donors.LeaseChecked())

    def _receive(self) -> None:
        sources = self.world.inputs[self.partition]
        if not sources:
            self.received = self.world.head
            return
        for source in sources:
            for peer in self.world.serving(source):
                reachable = not peer.frozen and (self.replica, peer.replica) not in self.world.cut
                if reachable and peer.log_base <= self.received + 1 and peer.epoch is not None:
                    self.received = max(self.received, min(peer.epoch, self.received + READ_EPOCHS))

    def truncate(self, floor: int) -> None:
        self.base = max(self.base, self.holds.floor(floor) + 1)
        self.log = {e: v for e, v in self.log.items() if e >= self.base}

    # -- polls ---------------------------------------------------------------------------------

    def polled(self, poll: Poll) -> None:
        if poll.fence < self.fence:
            return
        self.fence = poll.fence
        if not poll.ask_only:
            self._follow(poll)
        self.world.send(
            self.replica, None, lambda: self.world.responded(self, self._response(poll))
        )

    def _follow(self, poll: Poll) -> None:
        directive = poll.directive
        self.holds.update(directive.register, directive.release, self.log_base)
        if self.donor is not None and directive.release:
            self._step_donor(donors.SessionsReleased(directive.release))
        if self.epoch is not None:
            if poll.floor is not None:
                self.truncate(poll.floor)
            return
        if directive.abandoned is not None:  # no session up to this version may be used
            self._step_newcomer(newcomers.AbandonReceived(directive.abandoned))
        if directive.order is not None:
            self._step_newcomer(newcomers.OrderReceived(directive.order))
        if poll.restore is not None and self.newcomer.may_restore(directive.abandoned):
            self._step_newcomer(newcomers.RestoreBegun())
            self.world.restore(self, poll.restore)

    def _response(self, poll: Poll) -> Response:
        return Response(
            poll.fence,
            poll.number,
            self.boot,
            self.phase,
            -1 if self.epoch is None else self.epoch,
            self.received,
            self.restored_from,
            self.newcomer.report(),
            self.holds.confirmed(),
            self.donor.sessions if self.donor is not None else (),
        )

    # -- the newcomer's shell --------------------------------------------------------------------

    def received_by_newcomer(self, message: MessageToNewcomer) -> None:
        self._step_newcomer(newcomers.MessageReceived(message))

    def _step_newcomer(self, event: newcomers.NewcomerCoreEvent) -> None:
        for effect in self.newcomer.step(event, self.world.now):
            self._do_newcomer(effect)

    def _do_newcomer(self, effect: newcomers.NewcomerEffect) -> None:
        world = self.world
        match effect:
            case newcomers.SendToDonor(donor, message):
                if isinstance(message, ChunkRequest):
                    self.asked = max(self.asked, message.number + 1)
                world.send(self.replica, donor, lambda: world.to_donor(donor, message))
            case newcomers.StoreChunk(session, number, data):
                self.storing += 1
                world.later(self, lambda: self._stored(session, number, data))
            case newcomers.InstallState(session, offer):
                world.later(self, lambda: self._install(session, offer))
            case newcomers.DiscardState():
                self.stored, self.installed, self.asked, self.storing = b"", None, 0, 0
            case newcomers.StartFrom(_, epoch, base):
                assert self.installed is not None
                world.check_start(self, epoch, base, *self.installed)
                self.start(epoch, base, self.installed[1])

    def _stored(self, session: Session, number: int, data: bytes) -> None:
        progress = self.newcomer.report().progress
        if progress is None or progress.session != session or progress.phase.over:
            return  # what it was for is discarded
        self.storing -= 1
        if self.world.random.random() < self.world.disk_fails:
            self._step_newcomer(newcomers.StoringFailed(session, "disk full"))
            return
        self.stored += data
        self._step_newcomer(newcomers.ChunkStored(session, number))

    def _install(self, session: Session, offer: Offer) -> None:
        self.installed = parse(self.stored)
        digest = digest_of(*self.installed, offer.epoch, offer.base)
        self._step_newcomer(newcomers.StateInstalled(session, digest))

    # -- the donor's shell -----------------------------------------------------------------------

    def received_by_donor(self, message: MessageToDonor) -> None:
        if self.donor is not None:
            self._step_donor(donors.MessageReceived(message))

    def _step_donor(self, event: donors.DonorCoreEvent) -> None:
        assert self.donor is not None
        for effect in self.donor.step(event, self.world.now):
            self._do_donor(effect)

    def _do_donor(self, effect: donors.DonorEffect) -> None:
        world = self.world
        match effect:
            case donors.PinSnapshot(session):
                world.later(self, lambda: self._pin(session))
            case donors.UnpinSnapshot(session):
                self.pinned.pop(session, None)
            case donors.ReadChunk(session, number, slices):
                self.reading += 1
                world.later(self, lambda: self._read(session, number, slices))
            case donors.Reply(message):
                slot, incarnation = message.session.slot, message.session.incarnation
                to = Replica(slot, incarnation)
                world.send(self.replica, to, lambda: world.to_newcomer(to, message))

    def _pin(self, session: Session) -> None:
        if self.world.random.random() < self.world.disk_fails:
            self._step_donor(donors.PinFailed(session, "log is damaged"))
            return
        found = self.pinned[session] = snapshot_of(self)
        sizes = [len(piece) for piece in found.pieces]
        self._step_donor(
            donors.SnapshotPinned(session, found.epoch, found.base, sizes, found.digest)
        )

    def _read(self, session: Session, number: int, slices: tuple[Slice, ...]) -> None:
        self.reading -= 1
        found = self.pinned.get(session)
        if found is None:
            return
        if self.world.random.random() < self.world.disk_fails:
            self._step_donor(donors.ChunkUnreadable(session, number, "state cannot be read"))
            return
        data = b"".join(found.pieces[s.piece][s.offset : s.offset + s.nbytes] for s in slices)
        self._step_donor(donors.ChunkRead(session, number, data))


@dataclass
class Coordinator:
    """The shell of the coordinator's core: what it has heard, and what it polls."""

    world: World
    fence: int
    began: int
    responses: dict[Replica, Response] = field(default_factory=dict)
    outstanding: dict[Replica, tuple[int, int]] = field(default_factory=dict)  # number, sent at
    polls: int = 0
    settled: bool = False

    def __post_init__(self) -> None:
        self.core = MovementCore(self.fence, MOVEMENT)

    def run(self) -> None:
        world = self.world
        pods = [*world.pods]
        self.responses = {r: a for r, a in self.responses.items() if r in pods}
        unheard = [r for r in pods if r not in self.responses and r in world.was_ready]
        if not unheard or world.step - self.began >= DISCOVERY_STEPS:
            self.settled = True
        if self.settled:
            self.core.step(ReplicasObserved(self.views()), world.now)
        for replica, heard in self.responses.items():
            if self.core.directive_for(replica).may_restore and heard.restored_from is None:
                world.assign_restore_point(replica, heard.boot)
        floors = self.floors() if self.settled else {}
        for replica in pods:
            self._poll(replica, floors)

    def views(self) -> ReplicaViews:
        world = self.world
        return ReplicaViews((self._view(replica) for replica in world.pods), world.inputs)

    def _view(self, replica: Replica) -> ReplicaView:
        world, heard = self.world, self.responses.get(replica)
        unheard = ReplicaView(
            replica.slot,
            replica.incarnation,
            serves=replica in world.was_ready,
            trusted=replica not in world.diverged,
        )
        if heard is None:
            return unheard
        return replace(
            unheard,
            boot=heard.boot,
            phase=heard.phase,
            serves=heard.phase.serves,
            epoch=heard.epoch,
            restored_from=heard.restored_from,
            newcomer=heard.newcomer,
            holds=heard.holds,
            donates=heard.donates,
        )

    def floors(self) -> dict[Partition, int]:
        """Without sessions: what every current incarnation of each consumer has received."""
        world = self.world
        positions: dict[Partition, tuple[int, ...]] = {}
        unknown: set[Partition] = set()
        for replica in world.pods:
            heard, partition = self.responses.get(replica), partition_of(replica.slot)
            if heard is None:
                unknown.add(partition)
                continue
            if heard.restored_from is not None:
                position: int | None = heard.received
            else:
                position = world.restore_points.get((replica, heard.boot))
            if position is not None:
                positions[partition] = (*positions.get(partition, ()), position)
        progress = self.core.with_holds(Progress(positions, {}, frozenset(unknown)))
        found: dict[Partition, int] = {}
        for partition in world.inputs:
            readers = world.consumers[partition] or (partition,)
            known = [
                min(progress.positions[r])
                for r in readers
                if r not in progress.unknown and progress.positions.get(r)
            ]
            if len(known) == len(readers):
                found[partition] = min(known)
        return found

    def _poll(self, replica: Replica, floors: dict[Partition, int]) -> None:
        world = self.world
        number, sent_at = self.outstanding.get(replica, (0, -POLL_TIMEOUT_STEPS))
        if number and world.step - sent_at < POLL_TIMEOUT_STEPS:
            return
        self.polls += 1
        self.outstanding[replica] = (self.polls, world.step)
        poll = Poll(self.fence, self.polls)
        heard = self.responses.get(replica)
        if self.settled and heard is not None:
            directive = self.core.directive_for(replica)
            floor = floors.get(partition_of(replica.slot))
            if floor is not None:
                world.note_floor(partition_of(replica.slot), floor)
            restore = None
            if directive.may_restore and heard.restored_from is None:
                restore = world.restore_points.get((replica, heard.boot))
            poll = Poll(self.fence, self.polls, False, directive, floor, restore)
        world.send(None, replica, lambda: world.to_task(replica, poll))

    def answered(self, replica: Replica, response: Response) -> None:
        number, _ = self.outstanding.get(replica, (0, 0))
        if response.number != number or replica not in self.world.pods:
            return
        self.outstanding[replica] = (0, 0)
        self.responses[replica] = response


class World:
    def __init__(self, seed: int, src: int = 2, mid: int = 2, end: int = 1) -> None:
        self.random = random.Random(seed)
        self.model = Model()
        self.sizes = {"src": src, "mid": mid, "end": end}
        graph = build_graph(
            make_topology(
                [
                    SimulatedSegment("src", replicas=src),
                    SimulatedSegment("mid", ("src",), replicas=mid),
                    SimulatedSegment("end", ("mid",), replicas=end),
                ]
            )
        )
        self.inputs = {partition: graph.inputs[partition] for partition in graph.partitions}
        self.consumers = graph.consumers
        self.step = 0
        self.head = 0
        self.pods: dict[Replica, int] = {}  # from which step on each is replaced, if it is dead
        self.nodes: dict[Replica, Node] = {}
        self.was_ready: set[Replica] = set()
        self.moving_away: set[Replica] = set()  # their successors are there
        self.diverged: set[Replica] = set()
        self.restore_points: dict[tuple[Replica, str], int] = {}
        self.highest_floor: dict[Partition, int] = dict.fromkeys(self.inputs, -1)
        self.cut: set[tuple[Replica | None, Replica | None]] = set()
        self.loss = self.duplicates = self.damage = self.disk_fails = 0.0
        self.delay = 1
        self.violations: list[str] = []
        self.moved: list[tuple[Replica, int]] = []
        self.checkpoints_used = 0
        self._flights: list[tuple[int, int, Callable[[], None]]] = []
        self._boots = 0
        self._sent = 0
        for name, replicas in self.sizes.items():
            for index in range(replicas):
                node = self._create(Replica(Slot(name, 0, index), 1))
                node.start(-1, 0, {})
                self.was_ready.add(node.replica)
        self.coordinator = Coordinator(self, 1, 0)
        self.zombie: Coordinator | None = None

    @property
    def now(self) -> float:
        return self.step * STEP_S

    # -- running ---------------------------------------------------------------------------------

    def run(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.head += self.step % 2
            due = sorted((f for f in self._flights if f[0] <= self.step), key=lambda f: f[:2])
            self._flights = [f for f in self._flights if f[0] > self.step]
            for _, _, arrive in due:
                arrive()
            for node in [*self.nodes.values()]:
                if not node.frozen and node.alive:
                    node.run()
            for coordinator in (self.coordinator, self.zombie):
                if coordinator is not None and self.step % 2:
                    coordinator.run()
            self._operate()
            self._check()

    def send(self, sender: Replica | None, to: Replica | None, arrive: Callable[[], None]) -> None:
        """None is the coordinator. What is sent may be lost, late, repeated and overtaken."""
        if (sender, to) in self.cut or self.random.random() < self.loss:
            return
        copies = 2 if self.random.random() < self.duplicates else 1
        for _ in range(copies):
            self._sent += 1
            at = self.step + self.random.randint(1, self.delay)
            self._flights.append((at, self._sent, arrive))

    def later(self, node: Node, do: Callable[[], None]) -> None:
        """A thread of the node does it, unless its boot ends before."""

        def done() -> None:
            if node.alive:
                (node.inbox.append(do) if node.frozen else do())

        self._sent += 1
        self._flights.append((self.step + self.random.randint(0, 2), self._sent, done))

    def _deliver(self, replica: Replica, do: Callable[[Node], None]) -> None:
        node = self.nodes.get(replica)
        if node is not None:
            (node.inbox.append(lambda: do(node)) if node.frozen else do(node))

    def to_task(self, replica: Replica, poll: Poll) -> None:
        self._deliver(replica, lambda node: node.polled(poll))

    def to_donor(self, replica: Replica, message: MessageToDonor) -> None:
        self._deliver(replica, lambda node: node.received_by_donor(message))

    def to_newcomer(self, replica: Replica, message: MessageToNewcomer) -> None:
        if isinstance(message, Chunk) and self.random.random() < self.damage and message.data:
            message = replace(message, data=bytes([message.data[0] ^ 1]) + message.data[1:])
        self._deliver(replica, lambda node: node.received_by_newcomer(message))

    def responded(self, node: Node, response: Response) -> None:
        for coordinator in (self.coordinator, self.zombie):
            if coordinator is not None and coordinator.fence == response.fence:
                coordinator.answered(node.replica, response)

    # -- pods ------------------------------------------------------------------------------------

    def _create(self, replica: Replica) -> Node:
        self._boots += 1
        self.pods[replica] = self.step
        speed, pace = self.random.randint(1, 3), self.random.choice((1, 1, 4, 12))
        node = Node(self, replica, f"boot{self._boots}", speed=speed, pace=pace)
        self.nodes[replica] = node
        return node

    def _operate(self) -> None:
        """The operator: replaces dead pods, ends planned moves."""
        for replica in [*self.pods]:
            if replica in self.moving_away and (
                replica not in self.nodes or self._is_live(replica.slot.alternate)
            ):
                self._delete(replica)
            elif replica not in self.nodes and self.step >= self.pods[replica]:
                self._delete(replica)
                self._create(Replica(replica.slot, replica.incarnation + 1))
        for replica, node in self.nodes.items():
            if node.epoch is not None:
                self.was_ready.add(replica)

    def _is_live(self, slot: Slot) -> bool:
        return any(n.slot == slot and n.phase is TaskPhase.LIVE for n in self.nodes.values())

    def _delete(self, replica: Replica) -> None:
        del self.pods[replica]
        self.nodes.pop(replica, None)
        self.moving_away.discard(replica)
        self.diverged.discard(replica)

    def kill(self, replica: Replica) -> None:
        """Its pod is replaced some steps later."""
        if self.nodes.pop(replica, None) is not None:
            self.pods[replica] = self.step + self.random.randint(1, 16)

    def reboot(self, replica: Replica) -> None:
        """The container restarts: the same incarnation, another boot, no state; what upstream
        holds were in its memory are lost."""
        if replica in self.nodes:
            self._create(replica)

    def drain(self, replica: Replica) -> None:
        """Its successor comes while it still runs, under the other number."""
        is_moving = any(r.slot == replica.slot.alternate for r in self.pods)
        if replica in self.nodes and not is_moving:
            self.moving_away.add(replica)
            self._create(Replica(replica.slot.alternate, replica.incarnation + 1))

    def thaw(self, replica: Replica) -> None:
        node = self.nodes.get(replica)
        if node is not None and node.frozen:
            node.frozen = False
            inbox, node.inbox = node.inbox, []
            for do in inbox:
                if node.alive:
                    do()

    def restart_coordinator(self, keep_old: bool = False) -> None:
        self.zombie = self.coordinator if keep_old else None
        self.coordinator = Coordinator(self, self.coordinator.fence + 1, self.step)

    def serving(self, partition: Partition) -> list[Node]:
        found = (n for n in self.nodes.values() if n.slot.segment == partition.segment)
        return [node for node in found if node.epoch is not None]

    # -- checkpoints -----------------------------------------------------------------------------

    def note_floor(self, partition: Partition, floor: int) -> None:
        self.highest_floor[partition] = max(self.highest_floor[partition], floor)

    def assign_restore_point(self, replica: Replica, boot: str) -> None:
        """Once for each boot; every coordinator knows it."""
        sources = self.inputs[partition_of(replica.slot)]
        epoch = max((self.highest_floor[s] for s in sources), default=self.head - 1)
        self.restore_points.setdefault((replica, boot), epoch)

    def restore(self, node: Node, epoch: int) -> None:
        self.checkpoints_used += 1
        base = self.highest_floor[node.partition] + 1
        segment = node.slot.segment
        log = {e: self.model.output(segment, e) for e in range(base, epoch + 1)}
        node.start(epoch, base, log)

    # -- what must hold --------------------------------------------------------------------------

    def check_start(self, node: Node, epoch: int, base: int, state: State, log: Log) -> None:
        """A newcomer starts with exactly the donor's state and log after `epoch`."""
        self.moved.append((node.replica, epoch))
        segment = node.slot.segment
        if state != self.model.state(segment, epoch):
            self.violations.append(f"{node.slot.key} has another state than after epoch {epoch}")
        expected = {e: self.model.output(segment, e) for e in range(base, epoch + 1)}
        if log != expected:
            self.violations.append(f"{node.slot.key} has another log than {base} to {epoch}")

    def _check(self) -> None:
        self._check_inputs()
        for node in self.nodes.values():
            if node.epoch is None:
                self._check_memory(node)
            if node.donor is not None:
                reads = DONOR.chunks_at_once * (DONOR.sessions + 2)
                if len(node.pinned) > DONOR.sessions + 1 or node.reading > reads:
                    self.violations.append(f"{node.slot.key} keeps too much as a donor")

    def _check_memory(self, node: Node) -> None:
        stored = node.newcomer.report().progress
        at = stored.stored if stored is not None else 0
        if node.asked - at > CHUNKS_AT_ONCE or node.storing > 1:
            self.violations.append(f"{node.slot.key} has too many chunks in memory")
        if node.newcomer.bytes_in_memory > CHUNKS_AT_ONCE * CHUNK_BYTES:
            self.violations.append(f"{node.slot.key} counts too many chunks in memory")

    def _check_inputs(self) -> None:
        """I5: what a replica reads next is still there, if anything is."""
        for node in self.nodes.values():
            if node.epoch is None:
                continue
            for source in self.inputs[node.partition]:
                bases = [peer.log_base for peer in self.serving(source)]
                if bases and min(bases) > node.received + 1:
                    self.violations.append(
                        f"{node.slot.key} needs epoch {node.received + 1} of {source.key}, which "
                        f"begins at {min(bases)}"
                    )

    # -- the end ---------------------------------------------------------------------------------

    def heal(self) -> None:
        self.loss = self.duplicates = self.damage = self.disk_fails = 0.0
        self.delay = 1
        self.cut.clear()
        self.zombie = None
        self.diverged.clear()
        for replica in [*self.nodes]:
            self.thaw(replica)

    def moving(self) -> list[str]:
        """Newcomers that have no state yet."""
        return [f"{n.slot.key} has no state" for n in self.nodes.values() if n.epoch is None]

    def unsettled(self) -> list[str]:
        """What is not yet as it is without failures."""
        found = [f"{r.slot.key} is dead" for r in self.pods if r not in self.nodes]
        for node in self.nodes.values():
            name = f"{node.slot.key}, incarnation {node.replica.incarnation},"
            if node.phase is not TaskPhase.LIVE:
                found.append(f"{name} is {node.phase} at {node.epoch} of {self.head}")
            if node.holds.confirmed():
                found.append(f"{name} holds {node.holds.confirmed()}")
            if node.pinned:
                found.append(f"{name} has pinned {[*node.pinned]}")
        found += [f"{r.slot.key} moves away" for r in self.moving_away]
        for partition in self.inputs:
            live = sum(node.phase is TaskPhase.LIVE for node in self.serving(partition))
            if live != self.sizes[partition.segment]:
                found.append(f"{partition.key} has {live} live replicas")
        return found
