"""Settings of all tests: profiles of hypothesis, fewer garbage collections, no log in the
user's home, programs that SIGINT ends."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from rekindle.directories import cache_root

if TYPE_CHECKING:  # mypy allows one module named conftest, and checks the others as these
    import operator.tests.conftest  # noqa: F401

    import e2e.tests.conftest  # noqa: F401
    import pipelines.tests.conftest  # noqa: F401

# `--hypothesis-profile=nightly` takes the other one. What failed anywhere is tried first in every
# clone on this machine.
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=20,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
    database=DirectoryBasedExampleDatabase(cache_root(os.environ) / "hypothesis"),
)
settings.register_profile("nightly", settings.get_profile("ci"), max_examples=200)
settings.load_profile("ci")

gc.disable()  # while modules are imported: nothing of them is garbage


def pytest_collection_finish(session: pytest.Session) -> None:
    """The garbage collector skips what was imported."""
    has_groups = all("@" in item.nodeid for item in session.items)
    if session.config.getoption("loadgroup", False) and not has_groups:
        raise pytest.UsageError("this pytest-xdist gives tests no groups under this pytest")
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, one process runs all tests of the shared control plane, and one all
    tests of a file, with what it has started."""
    for item in items:
        shared = "api_server" in getattr(item, "fixturenames", ())
        group = "api" if shared else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True, scope="session")
def interruptible_programs() -> Iterator[None]:
    """Programs that tests start end on SIGINT. If pytest is a background job of a shell without job
    control, it ignores SIGINT, and they would inherit that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where `rekindle run` leaves Spark's log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
