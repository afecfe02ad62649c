"""The JVM's time zones: those of the package `tzdata`, as everywhere else in a task.

Java has a database of its own, of another release on each machine; it reads it from `java.home`. So
the JVM gets a `java.home` of links to the installed files, beside a database that is made from the
package: TZif files (RFC 9636) in, Java's `tzdb.dat` out, whose format is defined by
`sun.util.calendar.ZoneInfoFile` and `java.time.zone.Ser`.

Design: docs/design/engine.md#time-zones.
"""

from __future__ import annotations

import calendar
import contextlib
import hashlib
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import tzdata

from rekindle.engine.failure import EngineUnavailable

RELEASE: str = tzdata.IANA_VERSION
"""Such as `2026f`; Java reports it as the version of its zones."""
_DATABASE = "tzdb.dat"
_MODULES = "modules"
_HOUR_S, _DAY_S = 3_600, 86_400
_QUARTER_S = 900
_SHORT_TIMES = (-4_575_744_000, 10_413_792_000)
"""Java writes multiples of a quarter of an hour in this range with three bytes."""
_WALL_CLOCK = 1
_LAST_WEEK = 5


def make_java_home(java: Path, directory: Path) -> Path:
    """A `java.home` below `directory` for this `bin/java`, with the zones of the package. Raises
    EngineUnavailable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        installed = _installed_home(java)
        about = f"{RELEASE} {installed} {(installed / 'lib' / _MODULES).stat().st_mtime_ns}"
        home = directory / f"java-{hashlib.sha256(about.encode()).hexdigest()[:16]}"
        if not home.exists():
            with tempfile.TemporaryDirectory(dir=directory) as made:
                _link_home(installed, Path(made) / "home")
                with contextlib.suppress(OSError):  # another process was faster
                    (Path(made) / "home").rename(home)
        if not (home / "lib" / _DATABASE).exists():
            raise EngineUnavailable(f"the JVM's time zones cannot be written to {home}")
    except OSError as e:
        raise EngineUnavailable(f"the JVM's time zones cannot be written: {e}") from e
    return home


def _installed_home(java: Path) -> Path:
    """The `java.home` of a `bin/java`; the JVM says it if the file is a script that starts it."""
    home = java.parent.parent
    if (home / "lib" / _MODULES).exists():
        return home
    command = [str(java), "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        found = re.search(r"^ *java[.]home = (.+)$", done.stderr, re.MULTILINE)
    except (OSError, subprocess.SubprocessError):
        found = None
    if found is None or not (Path(found[1]) / "lib" / _MODULES).exists():
        raise EngineUnavailable(f"{java} is not of a JDK 17 or 21: set JAVA_HOME to one")
    return Path(found[1])


def _link_home(installed: Path, home: Path) -> None:
    (home / "lib").mkdir(parents=True)
    for path in (*installed.iterdir(), *(installed / "lib").iterdir()):
        if path.name not in ("lib", _DATABASE):
            (home / path.relative_to(installed)).symlink_to(path)
    (home / "lib" / _DATABASE).write_bytes(java_database())


def java_database() -> bytes:
    """All zones of the package as Java reads them."""
    names = sorted((files("tzdata") / "zones").read_text().split())
    directory = files("tzdata") / "zoneinfo"
    zones = [(directory / name).read_bytes() for name in names]
    distinct = {zone: number for number, zone in enumerate(dict.fromkeys(zones))}
    rules = [_java_rules(zone) for zone in distinct]
    count = struct.Struct(">H").pack
    return b"".join(
        (
            *(b"\x01", _text("TZDB"), count(1), _text(RELEASE)),
            *(count(len(names)), *map(_text, names)),
            *(count(len(rules)), *(count(len(rule)) + rule for rule in rules)),
            *(
                count(len(names)),
                *(count(at) + count(distinct[zone]) for at, zone in enumerate(zones)),
            ),
            count(0),  # names that are aliases of others
        )
    )


def _text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


@dataclass(frozen=True, slots=True)
class _Type:
    """A local time: seconds east of UTC."""

    offset_s: int
    is_dst: bool


def _java_rules(zone: bytes) -> bytes:
    """A zone, of the content of its TZif file, as a `java.time.zone.ZoneRules`."""
    types, transitions, footer = _parse(zone)
    changes = _yearly_changes(footer)
    # Java applies them after the last transition that changes the offset.
    transitions += _transitions_after(transitions[-1][0], changes) if changes else []
    standard = [t for t in transitions if not t[1].is_dst]
    return b"".join(
        (
            b"\x01",
            *_timeline(types[0], standard),
            *_timeline(types[0], transitions),
            struct.pack(">B", len(changes)),
            *(change.encoded() for change in changes),
        )
    )


_Transition = tuple[int, _Type]


def _parse(zone: bytes) -> tuple[Sequence[_Type], list[_Transition], str]:
    """Types of local time, of which the first holds before all transitions; transitions; rules for
    the time after them."""
    header = struct.Struct(">4sc15x6I")
    _, _, utc, wall, leaps, times, kinds, chars = header.unpack_from(zone)
    start = header.size + times * 5 + kinds * 6 + chars + leaps * 8 + wall + utc  # of 64 bits
    _, _, utc, wall, leaps, times, kinds, chars = header.unpack_from(zone, start)
    at = start + header.size
    moments = struct.unpack_from(f">{times}q", zone, at)
    kind_of = zone[at + 8 * times : at + 9 * times]
    at += 9 * times
    types = [_Type(*struct.unpack_from(">i?x", zone, at + 6 * n)) for n in range(kinds)]
    footer = zone[at + kinds * 6 + chars + leaps * 12 + wall + utc :].strip(b"\n").decode()
    return types, [(m, types[k]) for m, k in zip(moments, kind_of, strict=True)], footer


def _timeline(first: _Type, transitions: Sequence[_Transition]) -> Iterator[bytes]:
    """The times at which the offset changes, and the offsets before, between and after them."""
    times, offsets = [], [first.offset_s]
    for moment, kind in transitions:
        if kind.offset_s != offsets[-1]:
            times.append(moment)
            offsets.append(kind.offset_s)
    yield struct.pack(">i", len(times))
    yield from map(_moment, times)
    yield from map(_offset, offsets)


def _moment(seconds: int) -> bytes:
    first, end = _SHORT_TIMES
    if first <= seconds < end and seconds % _QUARTER_S == 0:
        return ((seconds - first) // _QUARTER_S).to_bytes(3, "big")
    return b"\xff" + struct.pack(">q", seconds)


def _offset(seconds: int) -> bytes:
    quarters, rest = divmod(seconds, _QUARTER_S)
    return struct.pack(">bi", 127, seconds) if rest else struct.pack(">b", quarters)


_NAME = r"(?:<[^>]+>|[A-Za-z]+)"
_FOOTER = re.compile(
    rf"{_NAME}(?P<standard>[^A-Za-z<,]+)"
    rf"(?:{_NAME}(?P<dst>[^,]*),(?P<begin>[^,]+),(?P<end>[^,]+))?"
)
_RULE = re.compile(r"M(?P<month>\d+)\.(?P<week>\d)\.(?P<day>\d)(?:/(?P<time>[-+:\d]+))?")


@dataclass(frozen=True, slots=True)
class _YearlyChange:
    """In the `week` of a month (5: the last), on this `day` of the week (0: Sunday), when `time_s`
    seconds of that day have passed by the clock; also a day before or after it."""

    month: int
    week: int
    day: int
    time_s: int
    standard_s: int
    before_s: int
    after: _Type

    def moment(self, year: int) -> int:
        """Seconds since 1970."""
        first, days = calendar.monthrange(year, self.month)  # Monday is 0
        day = 1 + (self.day - 1 - first) % 7 + 7 * (self.week - 1)
        day -= 7 if day > days else 0
        midnight = calendar.timegm((year, self.month, day, 0, 0, 0))
        return midnight + self.time_s - self.before_s

    def encoded(self) -> bytes:
        """A `java.time.zone.ZoneOffsetTransitionRule`: on the first such day of the week on or
        after a day of the month, or the last one on or before it."""
        days, time = divmod(self.time_s, _DAY_S)
        at_end_of_day = days == 1 and time == 0
        days = 0 if at_end_of_day else days
        day_of_month = (-1 if self.week == _LAST_WEEK else 7 * (self.week - 1) + 1) + days
        day_of_week = (self.day - 1 + days) % 7 + 1  # Monday is 1
        hour = 24 if at_end_of_day else time // _HOUR_S if time % _HOUR_S == 0 else 31
        quarters, rest = divmod(self.standard_s, _QUARTER_S)
        offsets = (self.before_s, self.after.offset_s)
        before, after = ({0: 0, 1_800: 1, _HOUR_S: 2}.get(o - self.standard_s, 3) for o in offsets)
        packed = struct.pack(
            ">I",
            self.month << 28
            | (day_of_month + 32) << 22
            | day_of_week << 19
            | hour << 14
            | _WALL_CLOCK << 12
            | (255 if rest else quarters + 128) << 4
            | before << 2
            | after,
        )
        more = (
            (hour == 31, time),
            (rest != 0, self.standard_s),
            (before == 3, self.before_s),
            (after == 3, self.after.offset_s),
        )
        return packed + b"".join(struct.pack(">i", value) for needed, value in more if needed)


def _yearly_changes(footer: str) -> Sequence[_YearlyChange]:
    """The two changes of each year after the last transition (POSIX, TZ), in the order of the year;
    none if the offset remains the same."""
    found = _FOOTER.fullmatch(footer)
    if found is None:
        raise EngineUnavailable(f"time zones: {footer!r} is not supported; report it as a bug")
    if found["begin"] is None:
        return ()
    standard_s = -_seconds(found["standard"])
    dst_s = -_seconds(found["dst"]) if found["dst"] else standard_s + _HOUR_S
    begin = _yearly_change(found["begin"], standard_s, standard_s, _Type(dst_s, is_dst=True))
    end = _yearly_change(found["end"], standard_s, dst_s, _Type(standard_s, is_dst=False))
    return sorted((begin, end), key=lambda change: change.month)


def _yearly_change(text: str, standard_s: int, before_s: int, after: _Type) -> _YearlyChange:
    found = _RULE.fullmatch(text)
    if found is None:
        raise EngineUnavailable(f"time zones: {text!r} is not supported; report it as a bug")
    month, week, day = (int(found[name]) for name in ("month", "week", "day"))
    time_s = _seconds(found["time"] or "2")
    return _YearlyChange(month, week, day, time_s, standard_s, before_s, after)


def _seconds(text: str) -> int:
    """Of [+-]hours[:minutes[:seconds]]."""
    parts = [int(part) for part in text.lstrip("+-").split(":")]
    seconds = sum(part * unit for part, unit in zip(parts, (_HOUR_S, 60, 1), strict=False))
    return -seconds if text.startswith("-") else seconds


def _transitions_after(last: int, changes: Sequence[_YearlyChange]) -> list[_Transition]:
    """Those of the two years from `last` on."""
    year = time.gmtime(last).tm_year
    found = [(c.moment(y), c.after) for y in (year, year + 1) for c in changes]
    return [transition for transition in found if transition[0] > last]
