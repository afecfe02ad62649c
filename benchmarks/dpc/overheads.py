"""Overheads without failures: Table 3 of the paper, and checkpoints.

Table 3: delay against the length of an epoch, which stands for two parameters of the paper, the
bucket size of its SUnion and the interval of its boundary tuples; with a finite and an infinite
maxDelay, two topologies side by side. The mean delay of a row is that of its epoch plus half the
epoch interval, since rows come evenly.

Checkpoints: the delay of rows against the checkpoint interval, beside Structured Streaming
(`structured_streaming`) at the same time, which has a checkpoint with each trigger.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dpc.scenario import START_INPUT_S, Deployed
from dpc.structured_streaming import StructuredStreaming
from dpc.topologies import EPOCH_S, MAX_DELAY_S, ROWS_PER_SECOND, SOURCES, Setting
from rekindle_testing.harness.cluster import EmbeddedCluster

EPOCHS_S = (0.1, 0.25, 0.5, 1.0, 2.0)
CHECKPOINTS_S = (0.5, 1.0, 5.0, 30.0)
MEASURED_S = 20.0
"""As in the paper; longer if checkpoints are rare."""


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """Seconds; delays are from the release of an epoch to its arrival at a reader."""

    epoch_s: float
    max_delay: str
    delay_p50_s: float
    delay_p99_s: float
    row_mean_s: float
    epochs: int


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """Seconds from when a row exists until a result that contains it arrived at a reader."""

    checkpoint_s: float
    engine: str
    row_mean_s: float
    row_max_s: float


def measure_overheads(cluster: EmbeddedCluster, epochs_s: Sequence[float]) -> Iterator[OverheadRow]:
    for epoch_s in epochs_s:
        settings = [
            Setting(
                f"epoch-{round(epoch_s * 1000)}-{name}",
                input_s=2 * START_INPUT_S,
                max_delay_s=max_delay_s,
                epoch_s=epoch_s,
                checkpoint_s=10 * max(epoch_s, 0.5),
            )
            for name, max_delay_s in (("finite", MAX_DELAY_S), ("infinite", None))
        ]
        for setting, delays in zip(settings, _delays_together(cluster, settings), strict=True):
            yield OverheadRow(
                epoch_s,
                "Infinite" if setting.max_delay_s is None else f"{setting.max_delay_s:g} s",
                round(statistics.median(delays), 4),
                round(_percentile(delays, 0.99), 4),
                round(statistics.mean(delays) + epoch_s / 2, 4),
                len(delays),
            )


def _delays_together(cluster: EmbeddedCluster, settings: Sequence[Setting]) -> list[list[float]]:
    """Of topologies that run side by side, during the same time."""
    with ExitStack() as stack, ThreadPoolExecutor(len(settings)) as pool:
        deployed = [stack.enter_context(Deployed(cluster, setting)) for setting in settings]
        found = list(pool.map(lambda d: d.delays_s(MEASURED_S), deployed))
    return [next(iter(by_node.values())) for by_node in found]


def measure_checkpoints(
    cluster: EmbeddedCluster, checkpoints_s: Sequence[float]
) -> Iterator[CheckpointRow]:
    with tempfile.TemporaryDirectory() as directory:
        streaming = StructuredStreaming(ROWS_PER_SECOND * len(SOURCES), Path(directory))
        with streaming:
            for checkpoint_s in checkpoints_s:
                # At least two checkpoints.
                seconds = max(MEASURED_S, 2.2 * checkpoint_s)
                setting = Setting(
                    f"checkpoint-{round(checkpoint_s * 1000)}",
                    input_s=2 * START_INPUT_S,
                    checkpoint_s=checkpoint_s,
                )
                with Deployed(cluster, setting) as deployed:
                    streaming.begin(checkpoint_s, seconds)
                    (delays,) = deployed.delays_s(seconds).values()
                    mean_s, max_s = streaming.result(seconds)
                ours = (statistics.mean(delays) + EPOCH_S / 2, max(delays) + EPOCH_S)
                yield CheckpointRow(checkpoint_s, "Rekindle", *_rounded(*ours))
                theirs = _rounded(mean_s, max_s)
                yield CheckpointRow(checkpoint_s, "Structured Streaming", *theirs)


def _rounded(mean_s: float, max_s: float) -> tuple[float, float]:
    return round(mean_s, 3), round(max_s, 3)


def _percentile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
