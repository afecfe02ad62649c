"""The images of this checkout in files, built anew only if what they are built from has changed."""

from __future__ import annotations

import contextlib
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rekindle_testing.embedded.cache import content_key
from rekindle_testing.images.build import BUILD_DIRECTORY, Builder, exclusive_lock, version
from rekindle_testing.images.image_runs import IMAGES
from rekindle_testing.paths import ROOT
from rekindle_testing.progress import OnProgress

_KEY_FILE = BUILD_DIRECTORY / "archives.key"
# What .dockerignore leaves in the build context.
_SOURCES = (
    *("images", "charts/rekindle/crds", "operator/pyproject.toml", "operator/src"),
    *("pipelines/pyproject.toml", "pipelines/src"),
)


@dataclass(frozen=True, slots=True)
class ImageArchive:
    """An image in a file, as `docker save` writes it, and its tag once it is loaded."""

    path: Path
    tag: str


def ensure_image_archives(on_progress: OnProgress) -> dict[str, ImageArchive]:
    """The archives by the name of their image; takes minutes if something has to be built."""
    with exclusive_lock():
        if not (_KEY_FILE.exists() and _KEY_FILE.read_text() == _key()):
            with write_source_hash_after_build():
                builder = Builder.for_this_machine(on_progress)
                for image in IMAGES:
                    builder.save(image, builder.build(image))
        paths = {image.name: BUILD_DIRECTORY / f"{image.name}.tar" for image in IMAGES}
        return {name: ImageArchive(path, tag_in(path)) for name, path in paths.items()}


@contextlib.contextmanager
def write_source_hash_after_build() -> Iterator[None]:
    """For a block that builds all archives: after it, writes the key (a hash) of the sources as
    they were before it. Archives are built again once the key of the sources differs."""
    key = _key()
    _KEY_FILE.unlink(missing_ok=True)
    yield
    _KEY_FILE.write_text(key)


def tag_in(archive: Path) -> str:
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        assert manifest is not None, archive
        (image,) = json.load(manifest)
    tag: str = image["RepoTags"][0]
    return tag


def _key() -> str:
    """A hash of all files of the checkout that a build reads, and of the version."""
    contents = ((str(file.relative_to(ROOT)), file.read_bytes()) for file in _files())
    return content_key([("version", version().encode()), *contents])


def _files() -> Iterable[Path]:
    for source in _SOURCES:
        path = ROOT / source
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file
