"""Results as tables: Markdown, CSV, JSON. Pure, but for `read` and `write`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dpc.failures import FailureRow
from dpc.overheads import CheckpointRow, OverheadRow
from dpc.throughput import RATIO_TARGET, ThroughputRow
from dpc.topologies import DELAY_FRACTION, MAX_DELAY_S

FLAT = 1.25
"""Target of the ratio of the largest to the smallest mean delay over all checkpoint intervals."""

AnyRow = FailureRow | OverheadRow | CheckpointRow | ThroughputRow

_KEEPS_X = "keeps X; fewer tentative results than Process/Process"
PAPER = {
    "Process/Process": "below alpha X for any length; the most tentative results",
    "Process/Delay": _KEEPS_X,
    "Process/Suspend": "breaks X for long failures",
    "Delay/Process": _KEEPS_X,
    "Delay/Delay": _KEEPS_X,
    "Delay/Suspend": "breaks X for failures longer than 3 s",
}
"""What section 5 says of Fig. 10; the values of its curves are only in the picture."""


@dataclass(frozen=True, slots=True)
class Results:
    """What was measured; parts that were not are empty."""

    waits: Sequence[FailureRow] = ()
    failures: Sequence[FailureRow] = ()
    chain: Sequence[FailureRow] = ()
    overheads: Sequence[OverheadRow] = ()
    checkpoints: Sequence[CheckpointRow] = ()
    throughput: Sequence[ThroughputRow] = ()

    def parts(self) -> dict[str, Sequence[AnyRow]]:
        """By name, those that were measured."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: rows for name, rows in found.items() if rows}


def write(results: Results, directory: Path) -> None:
    """`<part>.csv` and `<part>.json` of each part, and `dpc.md`. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in results.parts().items():
        (directory / f"{name}.csv").write_text(to_csv(rows))
        (directory / f"{name}.json").write_text(
            json.dumps([asdict(row) for row in rows], indent=2) + "\n"
        )
    (directory / "dpc.md").write_text(to_markdown(results))


def read(directory: Path) -> Results:
    """What earlier runs have written there."""
    kinds: dict[str, type[Any]] = {
        "waits": FailureRow,
        "failures": FailureRow,
        "chain": FailureRow,
        "overheads": OverheadRow,
        "checkpoints": CheckpointRow,
        "throughput": ThroughputRow,
    }
    return Results(
        **{name: _rows(directory / f"{name}.json", kind) for name, kind in kinds.items()}
    )


def missed(results: Results) -> list[str]:
    """The targets that were not met, in words."""
    found = []
    if results.checkpoints and (spread := _spread(results.checkpoints)) > FLAT:
        found.append(f"delay against the checkpoint interval: {spread:.2f}, at most {FLAT:g}")
    found += [
        f"throughput, ratio of finite to infinite maxDelay: {row.ratio:.3f}, at least "
        f"{RATIO_TARGET:g}"
        for row in results.throughput
        if not row.met
    ]
    return found


def _spread(rows: Sequence[CheckpointRow]) -> float:
    """The ratio of Rekindle's largest mean to its smallest."""
    means = [row.row_mean_s for row in rows if row.engine == "Rekindle"]
    return max(means) / min(means)


def _rows(path: Path, kind: type[Any]) -> list[Any]:
    return [kind(**row) for row in json.loads(path.read_text())] if path.exists() else []


def to_csv(rows: Sequence[AnyRow]) -> str:
    """One part; the columns are the fields of its rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def to_markdown(results: Results) -> str:
    """A section for each part."""
    writers = {
        "waits": _waits,
        "failures": _failures,
        "chain": _chain,
        "overheads": _overheads,
        "checkpoints": _checkpoints,
        "throughput": _throughput,
    }
    sections = [writers[name](rows) for name, rows in results.parts().items()]  # type: ignore[operator]
    return "\n".join(["# DPC's experiments", *sections])


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


_HEAD = ("failure, s", "delay of new results, s", "before, s", "tentative epochs", "tentative rows",
         "stable again after, s", "rows equal")  # fmt: skip


def _values(row: FailureRow) -> list[object]:
    late = "" if row.delay_new_s <= row.max_delay_s * row.chain else " (> X)"
    return [
        f"{row.failure_s:g}",
        f"{row.delay_new_s:.2f}{late}",
        f"{row.delay_before_s:.2f}",
        row.tentative_epochs,
        row.tentative_rows,
        f"{row.stabilized_s:.2f}",
        f"{row.rows_equal:,}",
    ]


def _waits(rows: Sequence[FailureRow]) -> str:
    lines = [[row.policy, f"{row.max_delay_s * DELAY_FRACTION:.1f}", *_values(row)] for row in rows]
    return (
        "\n## One of three inputs is cut, against alpha X (Fig. 9)\n\nIn the paper the delay is "
        "alpha X. With Process, nearly all epochs of a failure that lasts longer than alpha X are "
        "tentative, and none of a shorter one. With Delay their number falls as alpha X "
        "grows.\n\n" + table(("policy", "alpha X, s", *_HEAD), lines)
    )


def _failures(rows: Sequence[FailureRow]) -> str:
    lines = [[row.policy, *_values(row), PAPER[row.policy]] for row in rows]
    return (
        f"\n## One of three inputs is cut (Fig. 10)\n\nX is {MAX_DELAY_S:g} s. Policies: during "
        "the failure / during stabilization.\n\n" + table(("policy", *_HEAD, "the paper"), lines)
    )


def _chain(rows: Sequence[FailureRow]) -> str:
    lines = [[row.policy, row.chain, *_values(row)] for row in rows]
    return (
        "\n## A chain of tasks (Fig. 11)\n\nThe paper's bound is X for each task of the chain. "
        "There, Process/Process has the lowest delay, Delay/Delay adds one for each task, and "
        "Process/Suspend the stabilizations of all.\n\n" + table(("policy", "tasks", *_HEAD), lines)
    )


def _overheads(rows: Sequence[OverheadRow]) -> str:
    lines = [
        [f"{r.epoch_s:g}", r.max_delay]
        + [f"{s * 1000:.0f}" for s in (r.delay_p50_s, r.delay_p99_s, r.row_mean_s)]
        for r in rows
    ]
    head = ("epoch, s", "maxDelay", "delay p50, ms", "p99, ms", "of a row, mean, ms")
    return (
        "\n## No failure: delay against the length of an epoch (Table 3)\n\n"
        "In the paper the delay increases linearly with the interval of boundaries.\n\n"
        + table(head, lines)
    )


def _checkpoints(rows: Sequence[CheckpointRow]) -> str:
    lines = [
        [f"{r.checkpoint_s:g}", r.engine, f"{r.row_mean_s:.2f}", f"{r.row_max_s:.2f}"] for r in rows
    ]
    spread = _spread(rows)
    return (
        "\n## No failure: age of rows in results against the checkpoint interval\n\n"
        f"The ratio of Rekindle's largest mean to its smallest: {spread:.2f}; the target, {FLAT:g},"
        f" is {_met_text(spread <= FLAT)}.\n\n"
        + table(("checkpoint, s", "engine", "mean, s", "max, s"), lines)
    )


def _throughput(rows: Sequence[ThroughputRow]) -> str:
    head = ("finite, rows/s", "infinite, rows/s", "ratio", "quartiles", "pairs")
    lines = [
        [
            f"{r.finite:,}",
            f"{r.infinite:,}",
            f"{r.ratio:.3f}",
            f"{r.low:.3f}, {r.high:.3f}",
            r.pairs,
        ]
        for r in rows
    ]
    return (
        "\n## No failure: throughput with a finite and an infinite maxDelay\n\n"
        f"The target is a ratio of {RATIO_TARGET:g}: {_met_text(all(r.met for r in rows))}.\n\n"
        + table(head, lines)
    )


def _met_text(met: bool) -> str:
    return "met" if met else "**missed**"
