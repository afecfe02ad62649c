"""Expressions of event time and SQL know the same time zones, and give the same answers."""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from spark_parts import StartSession

from rekindle.arrow_types import TIMESTAMP
from rekindle.connectors.event_time import evaluate
from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.spark.jvm import find_java
from rekindle.engine.spark.time_zones import RELEASE, java_database, make_java_home
from rekindle.topology.schema import Scalar
from rekindle.topology.sql.event_time import Column, LocalTime
from rekindle.topology.sql.time_zones import find_zone

pytest.importorskip("pyspark")
from rekindle.engine.spark import session as sessions

ZONES = sorted((files("tzdata") / "zones").read_text().split())
MONTHS = np.arange("1970-01", "2041-01", dtype="datetime64[M]")
OTHER_YEARS = np.array(["0100", "1500", "1883", "1918", "1947", "2100", "2999", "9000"])
NOON = np.timedelta64(12, "h")


@pytest.fixture(scope="module")
def spark(start_shared: StartSession) -> Iterator[Any]:
    session = start_shared("time zones")
    yield session
    sessions.stop_session(session, keep_jvm=True)


def local_times() -> pa.Array:
    """Noon of the first of each month, and of the sixteenth of each in a few other years."""
    others = (OTHER_YEARS.astype("datetime64[Y]").astype("datetime64[M]")[:, None]) + np.arange(12)
    sixteenth = others.ravel().astype("datetime64[D]") + 15
    days = np.concatenate([MONTHS.astype("datetime64[D]"), sixteenth])
    return pa.array((days.astype("datetime64[us]") + NOON).astype("int64")).cast(TIMESTAMP)


@pytest.mark.spark
def test_expressions_and_sql_agree_on_all_zones(spark: Any) -> None:
    times = local_times()
    batch = pa.record_batch({"t": times})
    number = len(times)
    rows = pa.table(
        {
            "z": pa.array(np.repeat(ZONES, number)),
            "t": pa.concat_arrays([times] * len(ZONES)),
        }
    )
    spark.createDataFrame(rows).createOrReplaceTempView("local")
    sql = "SELECT to_utc_timestamp(t, z) AS u FROM local"
    of_sql = spark.sql(sql).toArrow().column("u").cast(pa.int64()).to_numpy()
    differ = {}
    for at, name in enumerate(ZONES):
        zone = find_zone(name)
        assert zone is not None
        local = LocalTime(Column("t", Scalar.TIMESTAMP), zone)
        expected = evaluate(local, batch).cast(pa.int64()).to_numpy()
        found = of_sql[at * number : (at + 1) * number]
        if (wrong := np.flatnonzero(expected != found)).size:
            differ[name] = [times[int(row)].as_py() for row in wrong[:3]]
    assert len(of_sql) == len(ZONES) * number
    assert not differ


@pytest.mark.spark
def test_a_zone_in_a_text_is_known(spark: Any) -> None:
    """Zones that are new, or that Java leaves out of its own database."""
    for zone, hours in (("America/Coyhaique", 3), ("Etc/GMT+7", 7), ("America/Vancouver", 7)):
        sql = f"SELECT CAST('2026-12-01 10:00:00 {zone}' AS TIMESTAMP) AS t"
        assert spark.sql(sql).toArrow().column("t")[0].as_py() == dt.datetime(
            2026, 12, 1, 10 + hours, tzinfo=dt.UTC
        )


@pytest.mark.spark
def test_java_reports_the_release_of_the_package(spark: Any) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm.java.time.zone.ZoneRulesProvider.getVersions("UTC").firstKey() == RELEASE
    # The older classes read the same file in another way.
    paris = jvm.java.util.TimeZone.getTimeZone("Europe/Paris")
    assert [paris.getOffset(at * 1000) for at in (1704067200, 1719792000)] == [3_600_000, 7_200_000]


def test_the_home_has_all_that_java_has(tmp_path: Path) -> None:
    installed = tmp_path / "jdk"
    for path in ("bin/java", "conf/net.properties", "lib/modules", "lib/server/libjvm.so"):
        (installed / path).parent.mkdir(parents=True, exist_ok=True)
        (installed / path).write_text(path)
    (installed / "lib" / "tzdb.dat").write_text("old")
    for _ in range(2):  # a task that starts again uses the same directory
        home = make_java_home(installed / "bin" / "java", tmp_path / "work")
    assert (home / "lib/server/libjvm.so").read_text() == "lib/server/libjvm.so"
    assert (home / "conf/net.properties").read_text() == "conf/net.properties"
    assert (home / "lib/tzdb.dat").read_bytes() == java_database()
    assert (installed / "lib" / "tzdb.dat").read_text() == "old"


def test_another_java_has_another_home(tmp_path: Path) -> None:
    homes = []
    for name in ("old", "new"):
        installed = tmp_path / name
        for path in ("bin/java", "lib/modules"):
            (installed / path).parent.mkdir(parents=True, exist_ok=True)
            (installed / path).write_text(name)
        homes.append(make_java_home(installed / "bin" / "java", tmp_path))
    assert [(home / "lib" / "modules").read_text() for home in homes] == ["old", "new"]


def test_a_script_that_starts_java_is_asked_for_its_home(tmp_path: Path) -> None:
    shim = tmp_path / "shims" / "java"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {find_java()} "$@"\n')
    shim.chmod(0o755)
    home = make_java_home(shim, tmp_path)
    assert (home / "lib" / "modules").resolve() == find_java().parents[1] / "lib" / "modules"
    shim.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(EngineUnavailable, match="set JAVA_HOME"):
        make_java_home(shim, tmp_path)


def test_the_database_names_its_release_and_all_zones() -> None:
    data = java_database()
    release = RELEASE.encode()
    assert data[:7] == b"\x01\0\x04TZDB"
    assert data[9 : 11 + len(release)] == struct.pack(">H", len(release)) + release
    (count,) = struct.unpack_from(">H", data, 11 + len(release))
    assert count == len(ZONES) > 500
