"""Probes and metrics of the coordinator: /startupz, /livez, /readyz, /metrics.

Design: docs/operations.md#metrics-and-logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.coordinator.core.report import restart_cost
from rekindle.coordinator.core.state_machine import Coordinator
from rekindle.protocol import CONTROL_PORT

_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """Polls are counted as they happen; all else is read from the state machine on each scrape."""

    def __init__(self, core: Coordinator) -> None:
        self.registry = CollectorRegistry()
        self.polls = Counter(
            "rekindle_coordinator_polls", "Polls of tasks", ["result"], registry=self.registry
        )
        self.poll_s = Histogram(
            "rekindle_coordinator_poll_seconds",
            "Time to a response",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_CoreCollector(core))

    def observe_poll(self, seconds: float, answered: bool) -> None:
        self.polls.labels("answered" if answered else "failed").inc()
        if answered:
            self.poll_s.observe(seconds)


class _CoreCollector(Collector):
    def __init__(self, core: Coordinator) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        core, now = self._core, time.monotonic()
        yield _gauge("rekindle_coordinator_fence", "Incarnation of this coordinator", core.fence)
        problems = len(core.problems(now))
        yield _gauge("rekindle_coordinator_problems", "Problems in the status", problems)
        comparison = core.containment.comparison
        disputes, diverged = len(comparison.disputes), len(comparison.diverged)
        what = "Partitions whose replicas disagree, until a further result decides"
        yield _gauge("rekindle_coordinator_disputes", what, disputes)
        what = "Replicas that computed something else than two others"
        yield _gauge("rekindle_coordinator_diverged", what, diverged)
        yield from self._tasks(core, now)
        yield from self._checkpoints(core)

    def _tasks(self, core: Coordinator, now: float) -> Iterator[Metric]:
        silence = GaugeMetricFamily(
            "rekindle_coordinator_heartbeat_age_seconds",
            "Time since a task's last response",
            labels=["slot"],
        )
        suspected = GaugeMetricFamily(
            "rekindle_coordinator_suspected",
            "1 for a task that is silent for too long",
            labels=["slot"],
        )
        replay = GaugeMetricFamily(
            "rekindle_coordinator_replay_epochs",
            "Epochs that a task would replay if it restarted now",
            labels=["slot"],
        )
        replay_s = GaugeMetricFamily(
            "rekindle_coordinator_replay_seconds",
            "Time that this would take at most",
            labels=["slot"],
        )
        for task in core.membership:
            if task.last_response_at is not None:
                silence.add_metric([task.slot.key], now - task.last_response_at)
            suspected.add_metric([task.slot.key], float(core.is_suspected(task)))
            if (restart := restart_cost(task, core.committer.own_manifest)) is not None:
                replay.add_metric([task.slot.key], restart.epochs)
                replay_s.add_metric([task.slot.key], restart.replay_s)
        yield from (silence, suspected, replay, replay_s)

    def _checkpoints(self, core: Coordinator) -> Iterator[Metric]:
        manifest, duration_s = core.committer.own_manifest, core.committer.duration_s
        if manifest is not None:
            what = "Epoch of the newest global checkpoint that this coordinator has committed"
            yield _gauge("rekindle_coordinator_checkpoint_epoch", what, manifest.epoch)
            what = "Number of the newest manifest that this coordinator has written"
            yield _gauge("rekindle_coordinator_manifest_seq", what, manifest.seq)
            what = "Epoch at which the next checkpoint is due"
            yield _gauge("rekindle_coordinator_next_checkpoint_epoch", what, core.next_checkpoint)
        if duration_s is not None:
            what = "Time to write the newest manifest"
            yield _gauge("rekindle_coordinator_checkpoint_commit_seconds", what, duration_s)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


async def serve(bind: str, metrics: Metrics, is_ready: Callable[[], bool]) -> web.AppRunner:
    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        if is_ready():
            return web.Response(text="ok\n")
        return web.Response(status=503, text="discovering tasks\n")

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/startupz", healthy)
    app.router.add_get("/livez", healthy)
    app.router.add_get("/readyz", ready)
    app.router.add_get("/metrics", scrape)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, bind, CONTROL_PORT).start()
    return runner
