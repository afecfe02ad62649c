"""Compressed files are read whole or refused: several streams, padding, damage, names that lie."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.connectors.compression import DECOMPRESSION_ERRORS, open_decompressed
from rekindle.connectors.files_read import read_batches
from rekindle.errors import SourceFailed
from rekindle.topology.kinds.files import FilesSourceSpec

FS = fsspec.filesystem("memory")
STREAMS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
CONTENT = b"c\n" + b"".join(b"%d\n" % (n * n) for n in range(200))


def zipped(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("c.csv", content)
    return packed.getvalue()


def legacy(content: bytes) -> bytes:
    return lzma.compress(content, lzma.FORMAT_ALONE)


ALL: dict[str, Callable[[bytes], bytes]] = {**STREAMS, ".zip": zipped, ".lzma": legacy}
NOT_SUPPORTED = {
    ".zst": b"\x28\xb5\x2f\xfd",
    ".zstd": b"\x28\xb5\x2f\xfd",
    ".lz4": b"\x04\x22\x4d\x18",
    ".snappy": b"\xff\x06\0\0sNaPpY",
    ".Z": b"\x1f\x9d\x90",
    ".br": b"\x0b\x02\x80\x01\x00",
    ".7z": b"7z\xbc\xaf\x27\x1c",
}


def read(name: str, data: bytes) -> bytes:
    FS.pipe_file(f"/{name}", data)
    with open_decompressed(FS, f"/{name}", name) as file:
        return file.read()


def read_or_refuse(name: str, data: bytes) -> bytes | None:
    try:
        return read(name, data)
    except (SourceFailed, *DECOMPRESSION_ERRORS):
        return None


@given(
    st.sampled_from([*STREAMS]),
    st.lists(
        st.binary(max_size=60).map(b"c".__add__) | st.just(CONTENT * 500), min_size=1, max_size=4
    ),
)
def test_all_streams_of_a_file_are_read(suffix: str, contents: list[bytes]) -> None:
    data = b"".join(STREAMS[suffix](content) for content in contents)
    assert read(f"f{suffix}", data) == b"".join(contents)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_xz_may_have_padding_after_each_stream(quarters: list[int]) -> None:
    one = lzma.compress(CONTENT)
    assert read("f.xz", b"".join(one + bytes(4 * n) for n in quarters)) == CONTENT * len(quarters)
    for odd in (1, 2, 3):
        assert read_or_refuse("f.xz", one + bytes(odd) + one) is None
        assert read_or_refuse("f.xz", one + bytes(odd)) is None


@pytest.mark.parametrize("suffix", STREAMS)
def test_a_file_with_any_damaged_byte_is_refused_or_whole(suffix: str) -> None:
    """Of two streams; some bytes mean nothing, such as the time in a gzip header."""
    whole = STREAMS[suffix](CONTENT) + STREAMS[suffix](CONTENT[::-1])
    changed = [
        read_or_refuse(f"f{suffix}", whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
        for at in range(len(whole))
        for mask in (0xFF, 0x01)
    ]
    assert {found for found in changed if found is not None} <= {CONTENT + CONTENT[::-1]}
    assert changed.count(None) > 0.9 * len(changed)


@pytest.mark.parametrize("suffix", ALL)
def test_a_file_that_was_cut_off_is_refused(suffix: str) -> None:
    one = ALL[suffix](CONTENT)
    whole = one if suffix in {".zip", ".lzma"} else one + one
    ends = {len(one), len(whole)}
    found = {n: read_or_refuse(f"f{suffix}", whole[:n]) for n in range(len(whole) + 1)}
    assert {n for n, content in found.items() if content is not None} == ends


@pytest.mark.parametrize("suffix", [*STREAMS, ".lzma"])
@pytest.mark.parametrize("garbage", [b"x", b"more text\n" * 50, b"\xff\xff\xff\xff", b"\0\0\0\1"])
def test_what_follows_the_last_stream_is_damage(suffix: str, garbage: bytes) -> None:
    assert read_or_refuse(f"f{suffix}", ALL[suffix](CONTENT) + garbage) is None


def test_a_zip_archive_has_nothing_before_or_after_it() -> None:
    one, two = zipped(CONTENT), zipped(CONTENT[::-1])
    for data in (one + two, b"x" + one, one + b"\0" * 35, one + one):
        assert read_or_refuse("f.zip", data) is None
    packed = io.BytesIO(one)
    with zipfile.ZipFile(packed, "a") as archive:
        archive.comment = b"made by hand"
    assert read("f.zip", packed.getvalue()) == CONTENT


@pytest.mark.parametrize("suffix", ALL)
@pytest.mark.parametrize("inner", [gzip.compress, zipped, bz2.compress])
def test_what_is_compressed_twice_is_named(suffix: str, inner: Callable[[bytes], bytes]) -> None:
    with pytest.raises(SourceFailed, match=r"it is compressed twice, inside with .*unpack it"):
        read(f"f{suffix}", ALL[suffix](inner(CONTENT)))


def test_a_zip_archive_needs_a_store_that_reads_parts() -> None:
    class FromBeginning(io.BytesIO):
        def seek(self, *_: object) -> int:
            raise ValueError("no ranges")

    class Store:
        def open(self, path: str, mode: str) -> io.BytesIO:
            return FromBeginning(zipped(CONTENT))

    with (
        pytest.raises(SourceFailed, match=r"f\.zip: no ranges; .*unpack it, or compress it"),
        open_decompressed(Store(), "/f.zip", "f.zip"),
    ):
        pass


@pytest.mark.parametrize("suffix", ALL)
@pytest.mark.parametrize("other", [*ALL, *NOT_SUPPORTED, "", ".csv"])
def test_the_name_says_what_the_content_is(suffix: str, other: str) -> None:
    data = ALL[suffix](CONTENT)
    if suffix == other:
        assert read(f"f{other}", data) == CONTENT
        return
    with pytest.raises(SourceFailed, match=rf"compressed with .*end its name with \{suffix}"):
        read(f"f{other}", data)
    if other in ALL:
        with pytest.raises(SourceFailed, match=rf"ends with \{other}, and the content is not"):
            read(f"f{other}", CONTENT)
    else:
        assert read(f"f{other}", CONTENT) == CONTENT


@pytest.mark.parametrize("suffix", NOT_SUPPORTED)
@pytest.mark.parametrize("named", [True, False])
def test_what_is_not_supported_is_named(suffix: str, named: bool) -> None:
    data = NOT_SUPPORTED[suffix] + bytes(range(256))
    if suffix == ".br" and not named:
        return  # nothing marks it
    with pytest.raises(SourceFailed, match=r"compressed with \S+, which is not supported: compr"):
        read(f"f{suffix if named else '.csv'}", data)


def encrypted() -> bytes:
    data = bytearray(zipped(CONTENT))
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(header) + flags] |= 1
    return bytes(data)


def unusual() -> bytes:
    data = bytearray(zipped(CONTENT))
    for header, method in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.index(header) + method] = 97
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("c.csv", gzip.compress(CONTENT), "compressed with gzip: end its name with .gz"),
        ("c.json", zipped(CONTENT), "compressed with zip: end its name with .zip"),
        ("c.csv.zst", b"\x28\xb5\x2f\xfd" + bytes(90), "Zstandard, which is not supported"),
        ("c.csv.zip", encrypted(), "encrypted.*unpack it"),
        ("c.csv.zip", unusual(), "compression method is not supported.*unpack it"),
        ("c.csv.bz2", bz2.compress(CONTENT)[:-9], "has no end; .*copy it again"),
        ("c.csv.bz2", bz2.compress(CONTENT) + b"BZh9 ", "Invalid data stream; .*copy it again"),
        ("c.json.xz", lzma.compress(b'{"c": 1}') + b"x" * 20, "; .*copy it again"),
        ("c.csv.gz", b"", "the content is not gzip"),
    ],
    # Not the data: archives have the time in them, and xdist's processes have to agree on names.
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else value,
)
def test_a_source_says_what_to_do(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(SourceFailed, match=rf"source s: .*{name}.*{message}"):
        rows(path)


def rows(path: Path) -> list[Any]:
    options = FilesSourceSpec.model_validate(
        {"url": f"file://{path}", "format": path.name.split(".")[1], "rowsPerSecond": 1}
    )
    local = fsspec.filesystem("file")
    found = read_batches(local, str(path), options, pa.schema([("c", pa.int64())]), "s")
    return [value for _, batch in found for value in batch.column(0).to_pylist()]


@pytest.mark.parametrize("suffix", ALL)
def test_rows_of_compressed_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"c.csv{suffix}"
    path.write_bytes(ALL[suffix](CONTENT))
    assert rows(path) == [n * n for n in range(200)]
