"""Figs. 10 and 11 of the paper: failures of one input, of several lengths, under each policy.

Fig. 10: one task, all six policies. Fig. 11: a chain of four tasks, of which each is the end of a
chain of one to four, since a task does not depend on those that read from it; so one failure
measures all four lengths. One replica of each task, unlike the paper's two: both branches run in
the one task (docs/design/consistency.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpc.scenario import Deployed, input_s, make_reference
from dpc.topologies import MAX_DELAY_S, Policy, Setting
from rekindle_testing.harness.cluster import EmbeddedCluster

CHAIN = 4


@dataclass(frozen=True, slots=True)
class FailureRow:
    """`chain`: tasks between the sources and the reader; `usual_s`: the largest delay before the
    failure; `stabilized_s`: from its end until output was stable and current; `rows_equal`: of the
    sink, compared with the reference at the end of the topology's run."""

    policy: str
    failure_s: float
    chain: int
    max_delay_s: float
    usual_s: float
    delay_new_s: float
    tentative_epochs: int
    tentative_rows: int
    stabilized_s: float
    rows_equal: int


def measure_failures(
    cluster: EmbeddedCluster,
    policies: Sequence[Policy],
    cuts_s: Sequence[float],
    chain: int = 1,
) -> Iterator[FailureRow]:
    """Each policy has a topology of its own, with the cuts one after another; its rows come when
    its sink has been compared. Raises AssertionError if that differs."""
    kind = "failures" if chain == 1 else "chain"
    settings = [
        Setting(f"{kind}-{number}", input_s(cuts_s), policy, chain=chain)
        for number, policy in enumerate(policies)
    ]
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
                    MAX_DELAY_S,
                    round(measured.usual_s, 3),
                    round(measured.outage.delay_new_s, 3),
                    measured.outage.tentative_epochs,
                    measured.outage.tentative_rows,
                    round(measured.outage.stabilized_s, 3),
                    equal,
                )
