"""Settings of the operator with their reasons, parsed once from the environment."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from rekindle_operator.election import ElectionTiming
from rekindle_operator.limits import NamespaceLimits, read_limits
from rekindle_operator.pod_policy import PodPolicy, parse_policy


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. Design: docs/design/recovery.md#loss, docs/design/recovery.md#gates."""

    node_silent_s: float = 3.0  # all tasks of a node are silent
    kubelet_silent_s: float = 1.5  # a busy machine responds later than an idle one, but within this
    probe_interval_s: float = 10.0  # with no suspicion; shows whether probes work
    probe_response_max_age_s: float = 30.0  # an older response does not show that probes work
    task_silent_s: float = 10.0  # one task on a good node: a stall is more likely than a loss
    report_late_s: float = 1.3  # a renewal of its Lease is late: nodes and pods are probed
    pod_silent_s: float = 2.0  # to probes of the operator, while its kubelet is silent as well
    report_fresh_s: float = 2.5  # two renewals of its Lease are missing: the report is outdated
    coordinator_silent_s: float = 6.0  # six renewals of its Lease are missing
    coordinator_start_s: float = 60.0  # without taking its Lease
    coordinator_pull_s: float = 300.0  # its node prepares it: a large image on a slow network
    scheduling_timeout_s: float = 5.0  # then the pod is replaced; binding takes milliseconds
    container_error_timeout_s: float = 60.0  # then the pod is replaced, after about three retries
    container_creation_timeout_s: float = 300.0  # the same before the first container is created
    refusal_max_age_s: float = 120.0  # since its gate opened; a later failure is not a refusal
    quarantine_s: float = 60.0  # longer than the 50 s after which Kubernetes reports NotReady
    capacity_reservation_s: float = 60.0  # how long spare replicas leave free what a query needs
    ending_max_s: float = 90.0  # longer than the grace of tasks; then a pod may never end
    rebalance_settle_s: float = 60.0  # of tasks and nodes, before each move to an emptier node
    rebalance_timeout_s: float = 600.0  # until the successor is live; then the task stays
    rebalance_retry_s: float = (
        240.0  # after a failed move; shorter than the 300 s for which a node is avoided
    )
    status_interval_s: float = 2.0  # between two writes of numbers that change with every epoch
    tick_s: float = 0.5  # between two passes without any change in the cluster
    resync_s: float = 30.0  # between two comparisons of the CRD with this operator's


@dataclass(frozen=True, slots=True)
class Election:
    enabled: bool = True
    name: str = "rekindle-operator"  # of the Lease
    namespace: str = "default"
    identity: str = field(default_factory=socket.gethostname)
    # The operator's own, which the Lease belongs to. Empty: it runs outside of a cluster.
    deployment: str = ""
    timing: ElectionTiming = field(default_factory=ElectionTiming)


@dataclass(frozen=True, slots=True)
class PodDefaults:
    """`image`: of tasks and coordinators, unless `spec.image` is set."""

    image: str = "rekindle/pipelines:0.1.0"
    pull_policy: str = "IfNotPresent"
    # It must have preemptionPolicy Never: the API server refuses that policy in a pod if its class
    # has another one. Empty: the cluster's default class.
    priority_class: str = ""
    placeholder_class: str = ""  # lower than that of all other pods, so that they preempt it
    coordinator_resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    policy: PodPolicy = field(default_factory=PodPolicy)


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    timing: Timing = field(default_factory=Timing)
    election: Election = field(default_factory=Election)
    pods: PodDefaults = field(default_factory=PodDefaults)
    limits: NamespaceLimits = field(default_factory=NamespaceLimits)
    namespace: str | None = None  # None: all namespaces
    probe_kubelets: bool = True
    own_node: str = ""  # the node of this replica
    # Value of the label of the pods of its peers (`LABEL_OPERATOR_DEPLOYMENT`): the name of their
    # Deployment, as `Election.deployment`.
    # Empty: lost peers are not replaced.
    helm_release: str = ""
    http_bind: str = "0.0.0.0"
    http_port: int = 8080
    log_level: str = "INFO"


def read_settings(env: Mapping[str, str] = os.environ) -> OperatorSettings:
    defaults = Election()
    return OperatorSettings(
        election=Election(
            enabled=_is_on(env, "REKINDLE_LEADER_ELECTION"),
            name=env.get("REKINDLE_LEASE_NAME", defaults.name),
            namespace=env.get("REKINDLE_OPERATOR_NAMESPACE", defaults.namespace),
            identity=env.get("REKINDLE_OPERATOR_IDENTITY", defaults.identity),
            deployment=env.get("REKINDLE_RELEASE", ""),
            timing=_election_timing(env),
        ),
        pods=PodDefaults(
            image=env.get("REKINDLE_PIPELINES_IMAGE", PodDefaults().image),
            pull_policy=env.get("REKINDLE_IMAGE_PULL_POLICY", PodDefaults().pull_policy),
            priority_class=env.get("REKINDLE_PRIORITY_CLASS", ""),
            placeholder_class=env.get("REKINDLE_PLACEHOLDER_PRIORITY_CLASS", ""),
            coordinator_resources=json.loads(env.get("REKINDLE_COORDINATOR_RESOURCES") or "{}"),
            policy=parse_policy(json.loads(env.get("REKINDLE_POD_POLICY") or "{}")),
        ),
        limits=read_limits(env),
        namespace=env.get("REKINDLE_WATCH_NAMESPACE") or None,
        own_node=env.get("REKINDLE_OPERATOR_NODE", ""),
        helm_release=env.get("REKINDLE_RELEASE", ""),
        probe_kubelets=_is_on(env, "REKINDLE_PROBE_KUBELETS"),
        http_bind=env.get("REKINDLE_HTTP_BIND", "0.0.0.0"),
        http_port=int(env.get("REKINDLE_HTTP_PORT", "8080")),
        log_level=env.get("REKINDLE_LOG_LEVEL", "INFO").upper(),
    )


def _election_timing(env: Mapping[str, str]) -> ElectionTiming:
    defaults = ElectionTiming()
    return ElectionTiming(
        lease_s=int(env.get("REKINDLE_LEASE_SECONDS", defaults.lease_s)),
        renew_deadline_s=float(
            env.get("REKINDLE_RENEW_DEADLINE_SECONDS", defaults.renew_deadline_s)
        ),
        renew_s=float(env.get("REKINDLE_RENEW_SECONDS", defaults.renew_s)),
        retry_s=float(env.get("REKINDLE_RETRY_SECONDS", defaults.retry_s)),
    )


def _is_on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "true").lower() != "false"
