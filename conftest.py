"""Settings of all tests: profiles of hypothesis, fewer garbage collections, no log in the
user's home, programs that SIGINT ends."""

import gc
import os
import re
import signal
from collections.abc import Collection, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.mark.expression import Expression
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


@cache
def markers_in(module: Path) -> frozenset[str]:
    """Those that a module names, or one beside it that it imports."""
    text = module.read_text()
    beside = (
        module.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", text, re.M)
    )
    imported = (markers_in(path) for path in beside if path != module and path.exists())
    return frozenset(re.findall(r"\bmark\.(\w+)", text)).union(*imported)


@cache
def may_have(expression: str, markers: frozenset[str]) -> bool:
    """Whether a test that has some of the markers may be one that `-m` selects."""
    parsed, relevant = Expression.compile(expression), sorted(m for m in markers if m in expression)

    def selects(some: Collection[str]) -> bool:
        return parsed.evaluate(lambda name, /, **options: name in some)

    numbers = range(len(relevant) + 1)
    return any(selects(some) for number in numbers for some in combinations(relevant, number))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules without a test that `-m` selects are not imported: with all of them it takes longer
    than many tests, in each process."""
    expression = config.getoption("markexpr")
    if not expression or not collection_path.name.startswith("test_"):
        return None
    return None if may_have(expression, markers_in(collection_path)) else True


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
