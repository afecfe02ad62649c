"""The chart with several sets of values: consistent objects, and wrong values that are refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chart import CHART, KUBERNETES, VALUE_SETS, VALUES, helm, objects

from rekindle_operator.pod_policy import Feature, parse_policy
from rekindle_operator.settings import read_settings
from rekindle_testing.paths import ROOT

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
EXTERNAL_OBJECTS = {("PriorityClass", "system-cluster-critical"), ("PriorityClass", "tasks")}


def identity(o: dict[str, Any]) -> tuple[str, str, str]:
    return o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]


def pod_templates(found: list[Any]) -> Iterator[dict[str, Any]]:
    for o in found:
        if o["kind"] in ("Deployment", "DaemonSet"):
            yield o["spec"]["template"]


def operator_env(found: list[Any]) -> dict[str, str]:
    (deployment,) = (o for o in found if o["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {e["name"]: e["value"] for e in container["env"] if "value" in e}


every_set = pytest.mark.parametrize("values", VALUE_SETS)


@pytest.mark.process
@every_set
def test_rendered_objects_are_unique_and_references_exist(values: str) -> None:
    found = objects(values)
    identities = [identity(o) for o in found]
    assert len(identities) == len(set(identities))
    there = {(kind, name) for kind, _, name in identities} | EXTERNAL_OBJECTS
    for template in pod_templates(found):
        spec = template["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in there
        if spec["priorityClassName"]:
            assert ("PriorityClass", spec["priorityClassName"]) in there
    task_class = operator_env(found)["REKINDLE_PRIORITY_CLASS"]
    assert not task_class or ("PriorityClass", task_class) in there
    for o in found:
        if o["kind"].endswith("Binding"):
            assert (o["roleRef"]["kind"], o["roleRef"]["name"]) in there
            for subject in o["subjects"]:
                assert (subject["kind"], subject["namespace"], subject["name"]) in identities


@pytest.mark.process
@every_set
def test_selectors_match_their_pods(values: str) -> None:
    found = objects(values)
    labels = [template["metadata"]["labels"] for template in pod_templates(found)]
    for o in found:
        selector = (o.get("spec") or {}).get("selector")
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert sum(wanted.items() <= each.items() for each in labels) == 1, identity(o)


@pytest.mark.process
def test_large_numbers_are_rendered_as_integers() -> None:
    """Helm reads them as floats, and writes 1000000 as 1e+06."""
    values = [o["value"] for o in objects("default") if o["kind"] == "PriorityClass"]
    assert sorted(values) == [-1, 0, 1_000_000]


@pytest.mark.process
@every_set
def test_the_operator_accepts_the_charts_settings(values: str) -> None:
    settings = read_settings(operator_env(objects(values)))
    wanted = VALUE_SETS[values].get("podPolicy", VALUES["podPolicy"])
    assert settings.pods.policy == parse_policy(wanted)
    assert settings.namespace == (VALUE_SETS[values].get("watchNamespace") or None)


def test_the_operator_reads_every_variable_that_the_chart_sets() -> None:
    read: set[str] = set()

    class Environment(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return default

    read_settings(Environment())
    template = (CHART / "templates/deployment.yaml").read_text()
    assert set(re.findall(r"name: (REKINDLE_\w+)", template)) <= read


@pytest.mark.process
@pytest.mark.parametrize(
    ("one", "two"),
    list(
        itertools.combinations(
            [
                ("rekindle", "system"),
                ("rekindle", "other"),
                ("rekindle", "other-a"),
                ("rekindle-a", "other"),
                ("a", "other"),
                ("b", "other"),
            ],
            2,
        )
    ),
)
def test_two_releases_share_no_object(one: tuple[str, str], two: tuple[str, str]) -> None:
    first, second = ({identity(o) for o in objects("default", *place)} for place in (one, two))
    assert not first & second


@pytest.mark.process
def test_a_namespace_has_one_operator() -> None:
    """Helm refuses the second release, because the object belongs to the first."""
    roles = [
        {identity(o) for o in objects("one namespace", *place) if o["kind"] == "Role"}
        for place in (("a", "system"), ("b", "other"))
    ]
    assert roles[0] & roles[1] == {("Role", "team-a", "rekindle-operator-topologies")}


@pytest.mark.process
@pytest.mark.parametrize("values", ["one namespace", "own namespace"])
def test_with_a_namespace_the_cluster_role_only_reads_nodes_and_pods(values: str) -> None:
    (role,) = (o for o in objects(values) if o["kind"] == "ClusterRole")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["get", "list", "watch"]}
    ]
    everywhere = next(o for o in objects("default") if o["kind"] == "ClusterRole")
    there = next(
        o
        for o in objects(values)
        if identity(o)[:2] == ("Role", VALUE_SETS[values]["watchNamespace"])
        and o["metadata"]["name"].endswith("topologies")
    )
    assert everywhere["rules"] == role["rules"] + there["rules"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "two"}, "replicas"),
        ({"antiAffinity": "hard"}, "antiAffinity"),
        ({"watchNamespace": "Team A"}, "watchNamespace"),
        ({"podPolicy": {"allow": ["HostRoot"]}}, "allow"),
        ({"namespaceLimits": {"maxShare": {"a": 2}}}, "maxShare"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"resources": {"memory": "1Gi"}}, "memory"),
    ],
)
def test_values_outside_the_schema_are_refused_by_name(
    values: dict[str, Any], message: str
) -> None:
    done = helm("template", "rekindle", *KUBERNETES, values=values)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr
    assert message in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"image": {"repository": "registry.example/rekindle/operator:0.1.0"}},
            'image.repository is "registry.example/rekindle/operator:0.1.0": write it like',
        ),
        ({"image": {"repository": "..."}}, 'image.repository is "...": write it like'),
        (
            {"pipelines": {"image": {"repository": f"a/b@sha256:{'0' * 64}"}}},
            "in pipelines.image.tag",
        ),
        ({"pipelines": {"image": {"tag": "sha256:0"}}}, 'pipelines.image.tag is "sha256:0": write'),
        (
            {"leaderElection": {"leaseSeconds": 1}},
            "renewDeadlineSeconds (1.6), and that less than leaseSeconds (1)",
        ),
        (
            {"podDisruptionBudget": {"minAvailable": 3}},
            "podDisruptionBudget.minAvailable (3) must be less than replicas (3)",
        ),
        ({"podDisruptionBudget": {"minAvailable": "100%"}}, "minAvailable (100%) must be less"),
    ],
)
def test_inconsistent_values_are_refused(values: dict[str, Any], message: str) -> None:
    done = helm("template", "rekindle", *KUBERNETES, values=values)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("repository", "tag"),
    [
        ("localhost:5000/operator", ""),
        ("123.dkr.ecr.eu-west-1.amazonaws.com/team_a/rekindle__operator", "v0.1.0-rc.1_2"),
        ("operator", f"0.1.0@sha256:{'0a' * 32}"),
    ],
)
def test_images_of_any_registry_and_digests_are_accepted(repository: str, tag: str) -> None:
    image = {"repository": repository, "tag": tag}
    done = helm("template", "rekindle", *KUBERNETES, values={"image": image})
    assert done.returncode == 0, done.stderr
    assert f'image: "{repository}:{tag or "0.1.0"}"' in done.stdout


@pytest.mark.process
def test_an_older_kubernetes_is_refused() -> None:
    done = helm("template", "rekindle", "--kube-version", "1.29.9")
    assert done.returncode != 0
    assert "chart requires kubeVersion: >=1.30" in done.stderr
    assert helm("template", "rekindle", "--kube-version", "1.31.2-gke.1").returncode == 0


@pytest.mark.process
@every_set
def test_helm_lint_finds_nothing(values: str) -> None:
    done = helm("lint", "--strict", values=VALUE_SETS[values])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_the_schema_has_every_value() -> None:
    def check(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        known = schema.get("properties")
        if known is None:
            return
        for name, value in values.items():
            assert name in known, f"values.schema.json does not have {path}{name}"
            if isinstance(value, dict):
                check(value, known[name], f"{path}{name}.")

    check(VALUES, SCHEMA, "")


def test_the_schema_has_every_feature_of_the_policy() -> None:
    allow = SCHEMA["properties"]["podPolicy"]["properties"]["allow"]
    assert allow["items"]["enum"] == list(Feature)
    assert all(feature in (CHART / "values.yaml").read_text() for feature in Feature)


def test_the_chart_has_the_crd_of_the_repository() -> None:
    names = [p.name for p in (ROOT / "crds").glob("*.yaml")]
    assert names
    for name in names:
        assert (CHART / "crds" / name).read_bytes() == (ROOT / "crds" / name).read_bytes()


def test_the_chart_is_complete_without_the_rest_of_the_repository() -> None:
    """Helm warns of symbolic links, and some programs that deploy from git skip them."""
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("image", ["operator", "pipelines"])
def test_all_that_an_image_installs_is_locked(image: str) -> None:
    """`test_images` compares the locks with what is tested."""
    text = (ROOT / "images" / image / "Dockerfile").read_text()
    commands = re.findall(r"bin/pip (?:--python \S+ )?(?:install|wheel) ([^&\n]*)", text)
    assert len(commands) == 5
    assert all("--require-hashes" in c or "--no-index" in c for c in commands), commands
    locks = {lock for c in commands for lock in re.findall(r"-r (\S+)", c)}
    assert locks == {"build.lock", f"{image}.lock"}


def test_images_get_only_what_they_need() -> None:
    """A file that a Dockerfile copies is let through by .dockerignore."""
    kept = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    dockerfiles = "".join(p.read_text() for p in (ROOT / "images").glob("*/Dockerfile"))
    lines = re.findall(r"(?m)^COPY ((?!--from).*) \S+$", dockerfiles)
    copied = [path for line in lines for path in line.split()]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        # A directory that is let through has all that is in it; of another, what is let through.
        assert any(f"{path}/".startswith(f"{k}/") or k.startswith(f"{path}/") for k in kept), path
    assert all((ROOT / path).exists() for path in kept)
