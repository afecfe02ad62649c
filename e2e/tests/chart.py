"""The chart as helm renders it, with the sets of values that tests render it with."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from typing import Any

import yaml

from rekindle_testing.embedded.toolchain import ensure_helm
from rekindle_testing.paths import ROOT

CHART = ROOT / "charts/rekindle"
# Without a cluster, helm assumes a version that depends on how helm was built.
KUBERNETES = ("--kube-version", "1.30.0")


VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


VALUE_SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "one namespace": {"watchNamespace": "team-a"},
    "own namespace": {"watchNamespace": "system"},
    "no classes": {
        "taskPriorityClass": {"create": False},
        "operatorPriorityClass": {"create": False},
        "placeholderPriorityClass": {"create": False},
    },
    "classes of others": {
        "priorityClassName": "system-cluster-critical",
        "taskPriorityClass": {"create": False, "name": "tasks"},
        "placeholderPriorityClass": {"create": False, "name": "lowest"},
    },
    "small": {
        "replicas": 1,
        "watchdog": {"enabled": False},
        "metrics": {"scrapeAnnotations": False, "service": {"enabled": False}},
        "podDisruptionBudget": {"enabled": False},
    },
    "all set": {
        "replicas": 5,
        "antiAffinity": "required",
        "imagePullSecrets": [{"name": "pull"}],
        "nodeSelector": {"role": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "platform"},
        "serviceAccount": {"name": "other", "annotations": {"a": "b"}},
        "namespaceLimits": {"maxPriority": {"*": 10}, "maxShare": {"*": 0.5}},
        "podPolicy": {
            "allow": ["HostPath"],
            "serviceAccounts": ["default", "irsa-*"],
            "secrets": [],
            "images": ["registry.example/"],
        },
    },
}


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(ensure_helm()), *arguments, str(CHART), "--values", "-"]
    return subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, check=False
    )


@cache
def rendered(values: str, release: str = "rekindle", namespace: str = "system") -> str:
    place = ("--namespace", namespace)
    done = helm("template", release, *place, *KUBERNETES, values=VALUE_SETS[values])
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(values: str, release: str = "rekindle", namespace: str = "system") -> list[Any]:
    return [o for o in yaml.safe_load_all(rendered(values, release, namespace)) if o]
