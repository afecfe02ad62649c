"""The objects of a topology beside its pods; its token above all: given to pods by reference,
restored with its value, and replaced without an outage."""

from __future__ import annotations

from typing import Any

import pytest
from flights_example import flights_spec
from model_api import ApiError, ModelOperator
from model_cluster import ModelCluster

from rekindle import names
from rekindle.identity import Identity
from rekindle_operator import tokens
from rekindle_operator.reconcile.actions import CreatePod, EnsureObject
from rekindle_operator.reconcile.core import reconcile, reconcile_all
from rekindle_operator.reconcile.schedule import schedule


def tokens_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    env = [e for c in pod["spec"]["containers"] for e in c.get("env", [])]
    return [e["valueFrom"]["secretKeyRef"] for e in env if e["name"] == "REKINDLE_TOKEN"]


def first_actions(cluster: ModelCluster) -> list[Any]:
    """Actions of the pass that creates the first pods."""
    for _ in range(5):
        actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
        if any(isinstance(a, CreatePod) for a in actions):
            return actions
        cluster.apply(actions)
    raise AssertionError("no pod is created")


def test_all_pods_refer_to_the_token_of_their_own_topology(cluster: ModelCluster) -> None:
    cluster.add_topology("other", flights_spec())
    for node in "abc":
        cluster.add_node(node)
    cluster.settle()
    owners = {
        (pod["metadata"]["labels"][names.LABEL_TOPOLOGY], ref["name"], ref["key"])
        for pod in cluster.raw_pods.values()
        for ref in tokens_of(pod)
    }
    assert all(len(tokens_of(pod)) == 1 for pod in cluster.raw_pods.values())
    assert {owner for owner, _, _ in owners} == {"flights", "other"}
    assert len({name for _, name, _ in owners}) == len(owners) == 2


def test_a_pod_template_cannot_replace_the_token(cluster: ModelCluster) -> None:
    env = [{"name": "REKINDLE_TOKEN", "value": "guessed"}]
    template = {"spec": {"containers": [{"name": "task", "env": env}]}}
    cluster.add_topology("other", flights_spec() | {"podTemplate": template})
    for node in "abc":
        cluster.add_node(node)
    cluster.settle()
    assert all(tokens_of(pod) for pod in cluster.raw_pods.values())


def test_what_pods_need_is_created_before_them(cluster: ModelCluster) -> None:
    actions = first_actions(cluster)
    kinds = [type(action) for action in actions]
    assert kinds.index(EnsureObject) < kinds.index(CreatePod)
    assert [a.kind for a in actions if isinstance(a, EnsureObject)] == [
        "Secret",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "Lease",
        "PodDisruptionBudget",
    ]


def test_a_task_waits_for_its_secret_alone(cluster: ModelCluster) -> None:
    """Whatever else is refused: a lost task has to come back."""
    first_actions(cluster)
    found = {}
    for scheduled in schedule(reconcile_all(cluster.snapshot(), cluster.now, cluster.settings)):
        if isinstance(scheduled.action, CreatePod):
            kinds = {key.split()[1] for key in scheduled.after if key.startswith("EnsureObject")}
            found[scheduled.action.is_coordinator] = kinds
    assert found == {False: {"Secret"}, True: {"Secret", "ServiceAccount", "Role", "RoleBinding"}}


def test_the_token_is_owned_and_decided_without_its_value(cluster: ModelCluster) -> None:
    actions = first_actions(cluster)
    token = next(a for a in actions if isinstance(a, EnsureObject) and a.kind == "Secret")
    assert token.manifest["metadata"]["ownerReferences"][0]["name"] == "flights"
    assert not {"data", "stringData"} & token.manifest.keys()


def test_no_role_of_a_coordinator_may_read_secrets(cluster: ModelCluster) -> None:
    actions = first_actions(cluster)
    roles = [a.manifest for a in actions if isinstance(a, EnsureObject) and a.kind == "Role"]
    rules = [r for role in roles for r in role["rules"]]
    assert rules
    assert not any({"secrets", "*"} & set(rule["resources"]) for rule in rules)


def test_each_token_is_random() -> None:
    values = [tokens.wanted_values({}, tokens.SeenTokens(), ())["token"] for _ in range(2)]
    assert len(set(values)) == 2
    assert all(len(value) >= 43 for value in values)


@pytest.fixture
def operator(running: ModelCluster) -> ModelOperator:
    """The real executor, which has seen the running topology."""
    operator = ModelOperator(running)
    operator.run(2.0)
    return operator


def secret_of(model: ModelCluster) -> dict[str, str]:
    (raw,) = (raw for (kind, _), raw in model.owned.items() if kind == "Secret")
    return tokens.decoded(raw["data"])


def pods_by_token(model: ModelCluster) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, raw in model.raw_pods.items():
        if not raw["metadata"].get("deletionTimestamp"):
            digest = raw["metadata"]["annotations"][names.ANNOTATION_TOKEN]
            found.setdefault(digest, set()).add(name)
    return found


@pytest.mark.parametrize(
    "kind", ["Secret", "ServiceAccount", "Role", "RoleBinding", "PodDisruptionBudget", "Lease"]
)
def test_a_deleted_object_comes_back_as_it_was(operator: ModelOperator, kind: str) -> None:
    model = operator.model
    if kind == "Lease":
        before: Any = {model.leases.pop("flights-coordinator").name}
    else:
        key = next(key for key in model.owned if key[0] == kind)
        before = model.owned.pop(key)
    pods = {raw["metadata"]["uid"] for raw in model.raw_pods.values()}
    operator.run(2.0)
    if kind == "Lease":
        assert before <= model.leases.keys()
        return
    after = model.owned[key]
    after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
    assert after == before
    assert {raw["metadata"]["uid"] for raw in model.raw_pods.values()} == pods


@pytest.mark.parametrize("field", ["rules", "subjects", "spec", "metadata"])
def test_an_object_that_was_changed_is_corrected(operator: ModelOperator, field: str) -> None:
    model = operator.model
    key, raw = next((k, r) for k, r in model.owned.items() if field in r)
    before = dict(raw)
    changed: Any = {"metadata": {**raw["metadata"], "labels": {}}}.get(field, [])
    model.owned[key] = {**raw, field: changed}
    model.owned[key]["metadata"] = {
        **model.owned[key]["metadata"],
        "name": raw["metadata"]["name"],
        "resourceVersion": str(model.next_version()),
    }
    operator.run(2.0)
    assert {k: v for k, v in model.owned[key].items() if k != "metadata"} == {
        k: v for k, v in before.items() if k != "metadata"
    }
    assert model.owned[key]["metadata"]["labels"] == before["metadata"]["labels"]


def test_objects_that_are_as_wanted_cause_no_call(operator: ModelOperator) -> None:
    operator.api.calls.clear()
    operator.run(5.0)
    assert not [c for c in operator.api.calls if "secrets" in c or "roles" in c or "leases" in c]


@pytest.mark.parametrize("before", ["kept", "dropped", "overwritten"])
def test_a_replaced_token_replaces_pods_one_by_one(operator: ModelOperator, before: str) -> None:
    """While both are there, new pods know both tokens; in the end only the new one counts."""
    model = operator.model
    old = secret_of(model)["token"]
    if before == "dropped":
        put_secret(model, {"token": "chosen"})
    else:
        replace_token(model, "chosen", old if before == "kept" else "chosen")
    operator.run(0.5)
    unlike_live = set[str]()
    for _ in range(240):
        operator.run(0.5)
        queries = model.status()["queries"]
        unlike_live |= {q["name"] for q in queries if q["state"] != "Live"}
        values = secret_of(model)
        by_token = pods_by_token(model)
        if tokens.token_digest(old) in by_token:
            assert values["running"] == old, "pods that have it are still there"
        if by_token.keys() == {tokens.token_digest("chosen")} and values["running"] == "chosen":
            break
    else:
        raise AssertionError("some pods keep the token before")
    assert "delay-alarms" not in unlike_live, "it has replicas"
    assert secret_of(model) == {
        "token": "chosen",
        "running": "chosen",
        "reader": Identity(token="chosen").reader_token,
    }


def replace_token(model: ModelCluster, token: str, running: str) -> None:
    reader = Identity(token=token).reader_token
    assert reader is not None
    put_secret(model, {"token": token, "running": running, "reader": reader})


def put_secret(
    model: ModelCluster,
    values: dict[str, str],
    *,
    immutable: bool = False,
    labels: dict[str, str] | None = None,
) -> None:
    (key,) = (key for key in model.owned if key[0] == "Secret")
    raw = model.owned[key]
    meta = {**raw["metadata"], "resourceVersion": str(model.next_version())}
    meta["labels"] = labels or meta["labels"]
    raw = {**raw, "data": tokens.encoded(values), "metadata": meta}
    model.owned[key] = raw | ({"immutable": True} if immutable else {})


def digest(token: str) -> str:
    return tokens.token_digest(token)


def degraded(model: ModelCluster) -> str:
    return str(model.condition("Degraded")["message"])


@pytest.mark.parametrize("tells", [True, False])
def test_tasks_that_no_new_pod_can_reach_do_not_stop_the_roll(
    operator: ModelOperator, tells: bool
) -> None:
    """Nobody knows the token before any more, or their release shows one token only."""
    model = operator.model
    operator = ModelOperator(model)
    running = secret_of(model)["token"]
    if not tells:  # an older version of the operator has made them
        for raw in model.raw_pods.values():
            del raw["metadata"]["annotations"][names.ANNOTATION_TOKEN]
    replace_token(model, "another", running if not tells else "another")
    model.stuck |= {p.name for p in model.tasks().values()}
    operator.run(60.0)
    assert pods_by_token(model).keys() == {tokens.token_digest("another")}
    assert set(model.query_states().values()) == {"Live"}
    assert secret_of(model)["running"] == "another"


def test_the_token_of_pods_is_known_until_no_pod_has_it() -> None:
    seen = tokens.SeenTokens().with_values({"token": "a", "running": "a"}, 1)
    seen = seen.with_values({"token": "b", "running": "b"}, 2).without_unused({digest("a")})
    assert tokens.wanted_values({"token": "c"}, seen, {digest("a")})["running"] == "a"
    assert digest("a") not in seen.without_unused({digest("b")}).by_digest


def test_the_token_that_most_pods_know_stays_until_none_has_it() -> None:
    """It was replaced twice: pods that got the second one know the first one, too."""
    seen = tokens.SeenTokens().with_values({"token": "a", "running": "a"}, 1)
    seen = seen.with_values({"token": "b"}, 2).with_values({"token": "c"}, 3)
    found = {"token": "c", "running": "a"}
    assert tokens.wanted_values(found, seen, {digest("a"), digest("b")})["running"] == "a"
    assert tokens.wanted_values(found, seen, {digest("b"), digest("c")})["running"] == "b"
    assert tokens.wanted_values(found, seen, {digest("c")})["running"] == "c"


def test_an_older_version_of_a_secret_is_not_taken_for_its_newest() -> None:
    seen = tokens.SeenTokens().with_values({"token": "b"}, 2).with_values({"token": "a"}, 1)
    assert seen.token == "b"


def test_tasks_that_restore_are_not_replaced_for_their_token(operator: ModelOperator) -> None:
    """They respond to the coordinator: they are only not live yet."""
    model = operator.model
    before = {p.uid for p in model.tasks().values()}
    model.task_reports = {name: {"phase": "Restoring"} for name in model.tasks()}
    replace_token(model, "chosen", secret_of(model)["token"])
    operator.run(40.0)
    assert {p.uid for p in model.tasks().values()} == before
    message = model.condition("Valid")["message"]
    assert "8 of 8 pods are outdated" in message
    assert "the roll waits for flown/0/0, " in message
    model.task_reports.clear()
    operator.run(60.0)
    assert pods_by_token(model).keys() == {tokens.token_digest("chosen")}


def test_a_replaced_token_waits_for_no_replica_without_a_node(operator: ModelOperator) -> None:
    """It may wait for ever. It may also take the place of its partner, which then waits."""
    model = operator.model
    for name in "bc":
        model.kill_node_until_not_ready(name)
    operator.run(20.0)
    assert any(p.node is None for p in model.tasks().values())
    replace_token(model, "chosen", secret_of(model)["token"])
    operator.run(90.0)
    assert pods_by_token(model).keys() == {tokens.token_digest("chosen")}
    assert set(model.query_states().values()) == {"Live"}


def test_values_of_secrets_of_no_topology_are_not_kept(operator: ModelOperator) -> None:
    cache = operator.cache
    meta = {"namespace": "default", "name": "x-token", "uid": "u", "resourceVersion": "999999"}
    cache.put_owned("Secret", {"metadata": meta, "data": tokens.encoded({"token": "a"})})
    cache.snapshot()
    assert not cache.seen_tokens("default", "x-token").token


def test_pods_of_a_version_that_does_not_tell_its_token_stay(operator: ModelOperator) -> None:
    model = operator.model
    for raw in model.raw_pods.values():
        del raw["metadata"]["annotations"][names.ANNOTATION_TOKEN]
    pods = {raw["metadata"]["uid"] for raw in model.raw_pods.values()}
    operator.run(5.0)
    assert {raw["metadata"]["uid"] for raw in model.raw_pods.values()} == pods


def test_an_immutable_secret_of_an_older_version_stays_as_it_is(operator: ModelOperator) -> None:
    model = operator.model
    values = {"token": secret_of(model)["token"]}
    put_secret(model, values, immutable=True, labels={names.LABEL_TOPOLOGY: "flights"})
    model.kill_node_until_not_ready("b")
    operator.run(30.0)
    (raw,) = (raw for (kind, _), raw in model.owned.items() if kind == "Secret")
    assert secret_of(model) == values
    assert raw["metadata"]["labels"].keys() > {names.LABEL_TOPOLOGY}, "its labels are corrected"
    assert set(model.query_states().values()) == {"Live"}, "no pod waits for it"
    assert model.condition("Degraded")["status"] == "False"


def test_an_immutable_secret_without_a_token_is_reported(operator: ModelOperator) -> None:
    put_secret(operator.model, {"reader": "x"}, immutable=True)
    operator.run(10.0)
    assert "is immutable and has no usable token; delete it" in degraded(operator.model)


def test_lost_tasks_do_not_wait_for_a_secret_that_cannot_be_corrected(
    operator: ModelOperator,
) -> None:
    model = operator.model
    put_secret(model, {"token": secret_of(model)["token"]})
    operator.api.errors = [ApiError("PATCH", "/secrets/", 403)]
    model.kill_node_until_not_ready("b")
    operator.run(30.0)
    assert set(model.query_states().values()) == {"Live"}
    assert "EnsureObject Secret" in degraded(model)


def test_no_pod_is_rolled_before_new_ones_know_both_tokens(operator: ModelOperator) -> None:
    model = operator.model
    put_secret(model, {"token": "chosen"})
    operator.api.errors = [ApiError("PATCH", "/secrets/", 403)]
    pods = pods_by_token(model)
    operator.run(10.0)
    assert pods_by_token(model) == pods


@pytest.mark.parametrize("token", ["chosen\n", "two words", "\x07", "ü", "", "x" * 1025])
def test_a_token_that_no_request_can_carry_is_refused(operator: ModelOperator, token: str) -> None:
    model = operator.model
    before, pods = secret_of(model), pods_by_token(model)
    put_secret(model, {**before, "token": token})
    operator.run(2.0)
    assert (secret_of(model), pods_by_token(model)) == (before, pods)
    (event,) = (e for e in operator.api.events if e["reason"] == "TokenRefused")
    assert "`token` in the Secret flights-token-uid-flig is refused" in event["note"]


def test_a_refused_token_of_before_the_start_is_replaced_by_the_running_one() -> None:
    wanted = tokens.wanted_values({"running": "a"}, tokens.SeenTokens(), ())
    assert (wanted["token"], wanted["running"]) == ("a", "a")


@pytest.mark.parametrize("data", [{}, {"token": ""}, {"token": "/w=="}, {"reader": "eA=="}])
def test_a_secret_without_a_usable_token_gets_the_one_that_was_seen(data: dict[str, str]) -> None:
    seen = tokens.SeenTokens().with_values({"token": "a", "running": "a"}, 1)
    wanted = tokens.wanted_values(tokens.decoded(data), seen, {tokens.token_digest("a")})
    assert (wanted["token"], wanted["running"]) == ("a", "a")
    assert not tokens.digests_of(tokens.decoded(data), immutable=False).is_complete
