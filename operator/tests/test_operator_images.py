"""The image is part of a generation: an upgrade of the operator changes no task in silence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from flights_example import flights_spec
from test_operator_model_cluster import ModelCluster

from rekindle_operator.settings import PodDefaults

NEW = "rekindle/pipelines:0.2.0"
OLD = PodDefaults().image


def upgrade(cluster: ModelCluster) -> None:
    """As `helm upgrade` with another image of tasks."""
    cluster.settings = replace(cluster.settings, pods=replace(cluster.settings.pods, image=NEW))


def images(cluster: ModelCluster, role: str) -> dict[str, Any]:
    return {
        name: raw["spec"]["containers"][0]["image"]
        for name, raw in cluster.raw_pods.items()
        if raw["metadata"]["labels"].get("rekindle.dev/role") == role
    }


def test_a_record_has_the_image_that_was_the_default(running: ModelCluster) -> None:
    (config,) = running.configs.values()
    assert json.loads(config["data"]["topology.json"])["image"] == OLD


def test_replacements_after_an_upgrade_run_the_recorded_image(running: ModelCluster) -> None:
    before = set(running.tasks())
    upgrade(running)
    running.lose_node("a")
    running.settle()
    assert set(running.tasks()) != before
    assert set(images(running, "task").values()) == {OLD}
    assert set(images(running, "coordinator").values()) == {OLD}


def test_an_outdated_image_is_said(running: ModelCluster) -> None:
    assert NEW not in running.condition("Valid")["message"]
    upgrade(running)
    running.settle()
    valid = running.condition("Valid")
    assert valid["status"] == "True"
    assert OLD in valid["message"]
    assert NEW in valid["message"]
    assert running.reasons().count("ImageOutdated") == 1


def test_the_next_generation_takes_the_new_image(running: ModelCluster) -> None:
    upgrade(running)
    running.settle()
    running.edit("flights", queries=[{**q, "priority": 7} for q in flights_spec()["queries"]])
    running.settle()
    assert NEW not in running.condition("Valid")["message"]
    running.lose_node("a")
    running.settle()
    assert NEW in images(running, "task").values()


def test_an_image_of_the_spec_is_nobodys_default(running: ModelCluster) -> None:
    running.edit("flights", image="mine:1")
    running.settle()
    upgrade(running)
    running.settle()
    assert running.condition("Valid")["message"].endswith("is accepted")
