"""Results as pictures in the form of the paper's figures, SVG.

Figs. 9 to 11: delay of new results above, tentative rows below. Table 3 and the checkpoints are
lines over the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpc.failures import FailureRow
from dpc.overheads import CheckpointRow, OverheadRow
from dpc.tables import Results
from dpc.topologies import DELAY_FRACTION, MAX_DELAY_S

Point = tuple[float, float]
_MARKERS = "osDv^x"


def draw(results: Results, directory: Path) -> list[Path]:
    """A picture for each part that was measured; their paths. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    if results.waits:
        drawn.append(_draw_waits(results.waits, directory / "fig9-waits.svg"))
    if results.failures:
        drawn.append(_draw_failures(results.failures, directory / "fig10-failures.svg"))
    if results.chain:
        drawn.append(_draw_chain(results.chain, directory / "fig11-chain.svg"))
    if results.overheads:
        drawn.append(_draw_overheads(results.overheads, directory / "table3-epochs.svg"))
    if results.checkpoints:
        drawn.append(_draw_checkpoints(results.checkpoints, directory / "checkpoints.svg"))
    return drawn


def _draw_waits(rows: Sequence[FailureRow], path: Path) -> Path:
    seconds = ", ".join(f"{s:g}" for s in sorted({row.failure_s for row in rows}))
    figure, above, below = _two_axes(f"A failure of {seconds} s, against alpha X (DPC, Fig. 9)")
    _delays_and_tentative(rows, above, below, _alpha_x)
    waits = sorted({_alpha_x(row) for row in rows})
    above.plot(waits, waits, color="#757575", linestyle=":", label="alpha X")
    below.set_xlabel("alpha X, s")
    return _save(figure, above, path)


def _alpha_x(row: FailureRow) -> float:
    return row.max_delay_s * DELAY_FRACTION


def _draw_failures(rows: Sequence[FailureRow], path: Path) -> Path:
    figure, above, below = _two_axes("One of three inputs is cut (DPC, Fig. 10)")
    _delays_and_tentative(rows, above, below, lambda row: row.failure_s)
    above.axhline(MAX_DELAY_S, color="#757575", linestyle=":", label="X")
    below.set_xlabel("duration of the failure, s")
    return _save(figure, above, path)


def _draw_chain(rows: Sequence[FailureRow], path: Path) -> Path:
    seconds = ", ".join(f"{s:g}" for s in sorted({row.failure_s for row in rows}))
    figure, above, below = _two_axes(f"A chain of tasks, a failure of {seconds} s (DPC, Fig. 11)")
    _delays_and_tentative(rows, above, below, lambda row: row.chain)
    lengths = sorted({row.chain for row in rows})
    bound = [MAX_DELAY_S * length for length in lengths]
    above.plot(lengths, bound, color="#757575", linestyle=":", label="X for each task")
    below.set_xticks(lengths)
    below.set_xlabel("tasks in the chain")
    return _save(figure, above, path)


def _draw_overheads(rows: Sequence[OverheadRow], path: Path) -> Path:
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    points = ((f"maxDelay {row.max_delay}", (row.epoch_s, row.row_mean_s)) for row in rows)
    _lines(axes, points)
    axes.set_title("No failure: delay against epoch length (DPC, Table 3)", fontsize=10)
    axes.set_xlabel("epoch, s")
    axes.set_ylabel("mean delay of a row, s")
    return _save(figure, axes, path)


def _draw_checkpoints(rows: Sequence[CheckpointRow], path: Path) -> Path:
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    _lines(axes, ((row.engine, (row.checkpoint_s, row.row_mean_s)) for row in rows))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title("No failure: age of rows in results", fontsize=10)
    axes.set_xlabel("checkpoint interval, s")
    axes.set_ylabel("mean, s")
    return _save(figure, axes, path)


def _two_axes(title: str) -> tuple[Figure, Axes, Axes]:
    figure = Figure(figsize=(6, 7))
    above, below = figure.add_subplot(211), figure.add_subplot(212)
    above.set_title(title, fontsize=10)
    above.set_ylabel("Delay_new: largest delay\nof new results, s")
    below.set_ylabel("N_tentative, rows")
    return figure, above, below


def _delays_and_tentative(
    rows: Sequence[FailureRow], above: Axes, below: Axes, x: Callable[[FailureRow], float]
) -> None:
    _lines(above, ((row.policy, (x(row), row.delay_new_s)) for row in rows))
    _lines(below, ((row.policy, (x(row), row.tentative_rows)) for row in rows))
    below.set_ylim(bottom=0)


def _lines(axes: Axes, points: Iterable[tuple[str, Point]]) -> None:
    """A line for each name, by ascending x."""
    by_name: dict[str, list[Point]] = {}
    for name, point in points:
        by_name.setdefault(name, []).append(point)
    for number, (name, line) in enumerate(by_name.items()):
        xs, ys = zip(*sorted(line), strict=True)
        axes.plot(xs, ys, marker=_MARKERS[number % len(_MARKERS)], label=name)
    axes.set_ylim(bottom=0)


def _save(figure: Figure, legend: Axes, path: Path) -> Path:
    legend.legend(fontsize=8)
    figure.savefig(path, bbox_inches="tight")
    return path
