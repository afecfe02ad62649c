"""Figs. 9 to 11 of the paper: failures of one input.

Fig. 9: one task, a failure of 5 s, several maxDelays. Fig. 10: one task, failures of several
lengths, all six policies. Fig. 11: a chain of four tasks, of which each is the end of a chain of
one to four, since a task does not depend on those that read from it; so one failure measures all
four lengths. One replica of each task, unlike the paper's two: both branches run in the one task
(docs/design/consistency.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpc.scenario import Deployed, input_s, make_reference
from dpc.topologies import DELAY_FRACTION, Policy, Setting
from rekindle_testing.harness.cluster import EmbeddedCluster

CHAIN = 4
WAITS_S = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
"""The values of alpha X, the time that an epoch may wait, in the paper's Fig. 9."""


@dataclass(frozen=True, slots=True)
class FailureRow:
    """`chain`: tasks between the sources and the reader; `delay_before_s`: the largest delay before
    the failure; `delay_new_s`: the largest delay of the first version of an epoch, stable or
    tentative (Delay_new in the paper); `stabilized_s`: from its end until output was stable and
    current; `rows_equal`: of the sink, compared with the reference at the end of the topology's
    run."""

    policy: str
    failure_s: float
    chain: int
    max_delay_s: float
    delay_before_s: float
    delay_new_s: float
    tentative_epochs: int
    tentative_rows: int
    stabilized_s: float
    rows_equal: int


def wait_settings(policies: Sequence[Policy], cut_s: float) -> list[Setting]:
    """A topology for each policy and wait of Fig. 9."""
    return [
        Setting(
            f"wait-{number}-{round(wait_s * 1000)}",
            input_s([cut_s]),
            policy,
            max_delay_s=round(wait_s / DELAY_FRACTION, 3),
        )
        for number, policy in enumerate(policies)
        for wait_s in WAITS_S
    ]


def failure_settings(policies: Sequence[Policy], cuts_s: Sequence[float]) -> list[Setting]:
    """A topology for each policy of Fig. 10."""
    return [
        Setting(f"failures-{number}", input_s(cuts_s), policy)
        for number, policy in enumerate(policies)
    ]


def chain_settings(policies: Sequence[Policy], cut_s: float) -> list[Setting]:
    """A topology for each policy of Fig. 11."""
    return [
        Setting(f"chain-{number}", input_s([cut_s]), policy, chain=CHAIN)
        for number, policy in enumerate(policies)
    ]


def measure_failures(
    cluster: EmbeddedCluster, settings: Sequence[Setting], cuts_s: Sequence[float]
) -> Iterator[FailureRow]:
    """Each topology has the cuts one after another; its rows are yielded once its sink has been
    compared. The topologies have the same input and operators. Raises AssertionError if a sink
    differs."""
    reference = make_reference(cluster, settings[0])
    for setting in settings:
        with Deployed(cluster, setting) as deployed:
            cuts = [(cut_s, deployed.cut(cut_s)) for cut_s in cuts_s]
            deployed.run.wait_sinks_advance()
            equal = deployed.verify(reference)
        for cut_s, at_tasks in cuts:
            for position, measured in enumerate(at_tasks, 1):
                yield FailureRow(
                    str(setting.policy),
                    cut_s,
                    position,
                    _finite(setting.max_delay_s),
                    round(measured.delay_before_s, 3),
                    round(measured.outage.delay_new_s, 3),
                    measured.outage.tentative_epochs,
                    measured.outage.tentative_rows,
                    round(measured.outage.stabilized_s, 3),
                    equal,
                )


def _finite(max_delay_s: float | None) -> float:
    assert max_delay_s is not None, "with an infinite maxDelay a failure has no tentative results"
    return max_delay_s
