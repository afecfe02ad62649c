"""Names that clusters have stored and users select by: they never change."""

from __future__ import annotations

import pytest

from rekindle import names

STORED = {
    "API_VERSION": "rekindle.dev/v1alpha1",
    "PLURAL": "streamtopologies",
    "KIND": "StreamTopology",
    "OPERATOR_FIELD_MANAGER": "rekindle-operator",
    "COORDINATOR_FIELD_MANAGER": "rekindle-coordinator",
    "OPERATOR_EVENT_REPORTER": "rekindle.dev/operator",
    "WATCHDOG_EVENT_REPORTER": "rekindle.dev/watchdog",
    "LABEL_TOPOLOGY": "rekindle.dev/topology",
    "LABEL_GENERATION": "rekindle.dev/generation",
    "LABEL_OPERATOR_DEPLOYMENT": "rekindle.dev/operator",
    "LABEL_ROLE": "rekindle.dev/role",
    "LABEL_SEGMENT": "rekindle.dev/segment",
    "LABEL_SEGMENT_NAME": "rekindle.dev/segment-name",
    "LABEL_PARTITION": "rekindle.dev/partition",
    "LABEL_REPLICA": "rekindle.dev/replica",
    "LABEL_INCARNATION": "rekindle.dev/incarnation",
    "LABEL_PLACEHOLDER_OF": "rekindle.dev/placeholder-of",
    "ROLE_TASK": "task",
    "ROLE_COORDINATOR": "coordinator",
    "ROLE_PLACEHOLDER": "placeholder",
    "ROLE_STANDBY": "standby",
    "GATE": "rekindle.dev/awaiting-capacity",
    "ANNOTATION_OPENED": "rekindle.dev/opened-at",
    "ANNOTATION_FAILED_PLACEMENTS": "rekindle.dev/attempt",
    "ANNOTATION_LOST": "rekindle.dev/lost-at",
    "ANNOTATION_REPLACES": "rekindle.dev/replaces",
    "ANNOTATION_SLOT": "rekindle.dev/slot",
    "ANNOTATION_TEMPLATE": "rekindle.dev/template",
    "ANNOTATION_SHAPE": "rekindle.dev/shape",
    "ANNOTATION_TOKEN": "rekindle.dev/token",
    "ANNOTATION_ROLL": "rekindle.dev/roll",
    "ANNOTATION_IMAGE": "rekindle.dev/image",
    "ANNOTATION_REPORT": "rekindle.dev/report",
    "ANNOTATION_HOLDER_PROCESS": "rekindle.dev/holder-process",
    "TOPOLOGY_KEY": "topology.json",
}


@pytest.mark.parametrize("name", STORED)
def test_a_stored_name_does_not_change(name: str) -> None:
    assert getattr(names, name) == STORED[name]


def test_all_labels_and_annotations_have_one_prefix() -> None:
    keys = {v for k, v in vars(names).items() if k.startswith(("LABEL_", "ANNOTATION_"))}
    assert all(key.startswith(names.OWN_PREFIX) for key in keys)
    assert keys <= set(STORED.values())


def test_object_names_are_made_from_the_topologys() -> None:
    assert names.generation_record_name("flights", 3) == "flights-g3"
    assert names.coordinator_name("flights") == "flights-coordinator"
    assert names.coordinator_pod_name("flights", 2) == "flights-coordinator-2"
    assert names.token_secret_name("flights", "12345678-9abc") == "flights-token-12345678"
