"""How chaos runs measure when results of a topology with a finite `maxDelay` are out."""

from __future__ import annotations

from prometheus_client import generate_latest

from rekindle.protocol import TaskRef
from rekindle.task.core.messages import TaskSettings
from rekindle.task.core.task import TaskCore
from rekindle.task.metrics import make_registry
from rekindle_testing.chaos import topologies
from rekindle_testing.chaos.freshness import Freshness, TaskSample
from rekindle_testing.chaos.task_samples import sample_of, upstream_of

ONE, OTHER, READER = ("source", 0), ("source", 1), ("reader", 0)


def sample(
    partition: tuple[str, int], stable: int, tentative: int = -1, *, live: bool = True
) -> TaskSample:
    return TaskSample(f"{partition}", partition, live, stable, tentative, epoch_p99_s=0.1)


def observed(*steps: tuple[float, list[TaskSample]], silent: bool = False) -> Freshness:
    freshness = Freshness({READER: frozenset({ONE, OTHER})}, max_delay_s=4.0)
    for at_s, samples in steps:
        freshness.observe(at_s, samples, silent=silent)
    return freshness


def test_an_epoch_waits_from_its_first_arrival_until_last_seen_without_a_result() -> None:
    found = observed(
        (0.0, [sample(ONE, 4), sample(OTHER, 4), sample(READER, 4)]),
        (1.0, [sample(ONE, 5), sample(READER, 4)]),
        (3.0, [sample(ONE, 5), sample(READER, 4)]),
        (4.0, [sample(ONE, 6), sample(READER, 4, tentative=5)]),
    )
    assert found.longest_s == 2.0
    assert found.tentative == 1


def test_nothing_is_late_while_no_input_arrives() -> None:
    found = observed(
        (0.0, [sample(ONE, 4), sample(READER, 4)]),
        (30.0, [sample(ONE, 4), sample(READER, 4)]),
    )
    assert found.longest_s == 0.0


def test_a_task_that_was_not_live_is_not_late() -> None:
    found = observed(
        (0.0, [sample(ONE, 9), sample(READER, 4, live=False)]),
        (20.0, [sample(ONE, 9), sample(READER, 4)]),
        (21.0, [sample(ONE, 9), sample(READER, 4)]),
    )
    assert found.longest_s == 1.0


def test_nothing_is_promised_while_a_node_is_cut_off() -> None:
    steps = [
        (0.0, [sample(ONE, 4), sample(READER, 4)]),
        (1.0, [sample(ONE, 5), sample(READER, 4)]),
        (30.0, [sample(ONE, 5), sample(READER, 4)]),
    ]
    assert observed(*steps, silent=True).longest_s == 0.0
    assert observed(*steps).longest_s == 29.0


def test_a_task_whose_engine_is_slow_is_not_late() -> None:
    slow = TaskSample("slow", READER, is_live=True, stable=4, tentative=-1, epoch_p99_s=2.0)
    found = observed((0.0, [sample(ONE, 5), slow]), (30.0, [sample(ONE, 5), slow]))
    assert found.longest_s == 0.0


def test_what_a_task_says_is_read_from_its_metrics() -> None:
    ref = TaskRef(segment="id", partition=1, replica=0, incarnation=1)
    core = TaskCore(TaskSettings(ref, "boot", 10, epoch_interval_us=1_000_000))
    text = generate_latest(make_registry(core, "trips", "busy")).decode()
    assert sample_of("pod", text) == TaskSample(
        "pod", ("busy", 1), is_live=False, stable=-1, tentative=-1, epoch_p99_s=0.0
    )


def test_an_address_may_be_that_of_another_program_by_now() -> None:
    assert sample_of("pod", "rekindle_coordinator_epoch 3\n") is None


def test_the_partitions_that_are_read_are_known_from_the_topology() -> None:
    trips = topologies.topology_resources(10, seed=1)[topologies.TRIPS]
    assert upstream_of(trips) == {("busy", 0): frozenset({("trips", 0), ("trips", 1)})}


def test_results_may_be_tentative_with_some_seeds() -> None:
    resources = [topologies.topology_resources(10, seed)[topologies.TRIPS] for seed in range(40)]
    tentative = [r["spec"]["availability"] for r in resources if topologies.may_be_tentative(r)]
    assert 10 < len(tentative) < 30
    assert len({tuple(policies.values()) for policies in tentative}) >= 5


def test_half_of_the_seeds_have_a_join_of_as_many_tasks() -> None:
    resources = [topologies.topology_resources(10, seed)[topologies.METERS] for seed in range(40)]
    names = ["exceeded" if "join" in r["spec"]["operators"][0] else "totals" for r in resources]
    assert 10 < names.count("exceeded") < 30
    tasks = {
        sum(
            node.get("partitions", 1) * node.get("replicas", 1)
            for node in [*r["spec"]["sources"], *r["spec"]["operators"]]
        )
        for r in resources
    }
    assert tasks == {4}


def test_half_of_the_seeds_have_a_replay_target() -> None:
    resources = [topologies.topology_resources(10, seed)[topologies.METERS] for seed in range(40)]
    found = ["replayTarget" in resource["spec"]["checkpoint"] for resource in resources]
    assert 10 < sum(found) < 30
