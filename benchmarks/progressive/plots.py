"""Pictures in the form of Figs. 3 and 5 of the paper, SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.figure import Figure

from progressive.experiment import FIRST_S, LAST_S
from progressive.timing import INTERVAL_S, THRESHOLD, Interval

_BIN_S = 20
_SECONDS = "seconds after the failure"
mpl.rcParams["svg.fonttype"] = "none"
mpl.rcParams["svg.hashsalt"] = "progressive"  # equal results have equal files


def draw_arrivals(arrivals: Sequence[float], path: Path) -> None:
    figure = Figure(figsize=(5, 2.5))
    axes = figure.add_subplot()
    edges = range(int(FIRST_S), int(LAST_S) + _BIN_S, _BIN_S)
    weights = [100 / len(arrivals)] * len(arrivals)
    axes.hist(arrivals, bins=list(edges), weights=weights, rwidth=0.9)
    axes.set_xlabel("seconds until a new node is Ready")
    axes.set_ylabel("% of nodes")
    _save(figure, path)


def draw_recoveries(
    runs: Mapping[str, Sequence[Sequence[Interval]]], arrivals: Sequence[float], path: Path
) -> None:
    """Means over all samples below, the first sample above, in which a node arrives at each tick of
    its axis. Relative latencies are those of queries that answer, of the first sample."""
    figure = Figure(figsize=(9, 6))
    latency, first, mean = figure.subplots(3, 1, sharex=True)
    for name, samples in runs.items():
        seconds = [interval.at_s for interval in samples[0]]
        latency.plot(seconds, [i.relative_latency for i in samples[0]], label=name)
        first.step(seconds, [i.available for i in samples[0]], where="pre", label=name)
        available = [fmean(i.available for i in at) for at in zip(*samples, strict=True)]
        mean.step(seconds, available, where="pre", label=name)
    latency.set_yscale("log")
    latency.axhline(THRESHOLD, color="#757575", linestyle="--", linewidth=1)
    latency.set_ylabel("relative latency")
    first.set_ylabel("available, one sample")
    mean.set_ylabel("available, mean")
    for at_s in arrivals:
        first.axvline(at_s, color="#bdbdbd", linewidth=0.6)
    mean.set_xlabel(_SECONDS)
    mean.set_xlim(FIRST_S - INTERVAL_S, LAST_S + 60)
    mean.legend(loc="lower right", frameon=False, fontsize=8)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
