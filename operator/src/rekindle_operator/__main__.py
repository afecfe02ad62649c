"""`python -m rekindle_operator`: a replica of the operator."""

from __future__ import annotations

# Before the slow imports: from here on SIGTERM ends the process.
import rekindle.early_exit  # noqa: F401

# isort: split
import logging
import os
import resource
import threading
from collections.abc import Callable
from typing import Any, cast

import kopf
from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException

from rekindle_operator.clock import SteadyClock
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.crd_check import CrdCheck
from rekindle_operator.dispatch import WORKERS
from rekindle_operator.execute import Executor
from rekindle_operator.handlers import make_registry
from rekindle_operator.leader import Leader
from rekindle_operator.logs import set_up_logging
from rekindle_operator.loop import ControlLoop
from rekindle_operator.metrics import serve
from rekindle_operator.nesting import raise_recursion_limit
from rekindle_operator.probe import HealthProber
from rekindle_operator.settings import read_settings
from rekindle_operator.uncached_check import UncachedCheck

_LAST_PASS_S = 2.0  # for the pass in progress at the end of the process

logger = logging.getLogger(__name__)


def main() -> None:
    raise_recursion_limit()
    _raise_file_limit()
    settings = read_settings()
    set_up_logging(settings.log_level)
    _read_access()
    clock = SteadyClock()
    cluster = ClusterCache(_connect_without_retries(), settings.namespace, clock, settings.own_node)
    leader = Leader(
        _connect_without_retries(),
        settings.election,
        cluster.reset_timers,
        ready=lambda: cluster.synced,
        healthy=lambda: loop.alive,
    )
    crd = CrdCheck(
        _connect_without_retries(), cluster.remember_crd_missing_fields, settings.timing.resync_s
    )
    executor = Executor(
        _connect_without_retries(),
        cluster,
        settings.election.identity,
        settings.timing.status_interval_s,
        clock,
        leader.may_act,
        on_refused_status=crd.request,
    )
    uncached = UncachedCheck(_connect_without_retries(), cluster)
    loop = ControlLoop(cluster, executor, uncached, settings, leader, clock, crd.request)
    serve(settings.http_bind, settings.http_port, lambda: loop.alive, lambda: cluster.synced)
    cluster.start()
    leader.start()
    # The CRD may come later; and without an API server Kopf would end the process.
    cluster.wait_until_synced()

    def begin() -> None:
        crd.compare()
        threading.Thread(target=crd.run, name="crd", daemon=True).start()
        if settings.probe_kubelets:
            prober = HealthProber(cluster, settings.timing, clock)
            threading.Thread(target=prober.run, name="kubelets", daemon=True).start()
        control = threading.Thread(
            target=_exit_if_it_ends, args=(loop.run,), name="control", daemon=True
        )
        control.start()

    def end() -> None:
        leader.release()
        loop.end(_LAST_PASS_S)

    # In the main thread, until SIGTERM or SIGINT.
    kopf.run(
        registry=make_registry(begin, end),
        # Kopf's default is the user's name, and the user of a pod may have none.
        identity=cast(Any, settings.election.identity),
        standalone=True,  # the leader election decides who acts
        clusterwide=True,  # which it need not be: there is nothing that Kopf watches
    )


def _raise_file_limit() -> None:
    """Many dead nodes have many probes in flight; one that gets no socket would look unanswered."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _read_access() -> None:
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except ConfigException:
        config.load_kube_config()  # type: ignore[no-untyped-call]


def _connect_without_retries() -> client.ApiClient:
    """A client with its own connections. Retries would hide late responses and dead connections."""
    configuration = client.Configuration.get_default_copy()
    configuration.retries = 0
    # Two for each worker of the executor; the default depends on the number of cores.
    configuration.connection_pool_maxsize = max(configuration.connection_pool_maxsize, 2 * WORKERS)
    return client.ApiClient(configuration)


def _exit_if_it_ends(run: Callable[[], None]) -> None:
    """Without a control loop this replica would lead and do nothing."""
    try:
        run()
    except BaseException:
        logger.exception("the control loop failed")
    logger.error("the control loop has ended; this process exits")
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    main()
