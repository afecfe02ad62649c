"""The program of the pods that work on a volume: `python -c` runs this file's text.

The standard library alone, of any Python 3. The last line of its output is the answer, as JSON.
Started by `transfer.Volume`, with the parts of an archive to write as files in `input_directory`.
"""

import base64
import hashlib
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

_ARCHIVE_DIRECTORY = ".transfer"  # archives that are read in parts


def main(root: Path, input_directory: Path, verb: str, *arguments: str) -> dict[str, object]:
    answer: dict[str, object] = {}
    if verb == "write":
        content = b"".join(part.read_bytes() for part in sorted(input_directory.glob("transfer-*")))
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                # The user of the pod becomes the owner.
                tar.extract(member, root, set_attrs=False)
    elif verb == "read":
        answer = _read(root, *arguments)
    elif verb == "move":
        (root / arguments[0]).rename(root / arguments[1])
    elif verb == "list":
        answer = {"names": sorted(p.name for p in root.iterdir() if p.name != "lost+found")}
    elif verb == "clear":
        for path in root.iterdir():
            if path.is_dir() and path.name != "lost+found":
                shutil.rmtree(path)
            elif path.is_file():
                path.unlink()
    else:
        raise SystemExit(f"unknown: {verb}")
    return answer


def _read(root: Path, path: str, offset: str, size: str) -> dict[str, object]:
    """One part of the archive of a folder. The first call makes the archive; one that does not fit
    into one part is kept until the last part was read."""
    directory = root / _ARCHIVE_DIRECTORY
    archive = directory / "archive.tar.gz"
    content = _archive(root, path) if offset == "0" else archive.read_bytes()
    part = content[int(offset) : int(offset) + int(size)]
    if int(offset) + len(part) >= len(content):
        shutil.rmtree(directory, ignore_errors=True)
    elif offset == "0":
        directory.mkdir(exist_ok=True)
        archive.write_bytes(content)
    data = base64.b64encode(part).decode()
    return {"size": len(content), "sha256": hashlib.sha256(part).hexdigest(), "data": data}


def _archive(root: Path, path: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for file in sorted((root / path).rglob("*")):
            try:
                if file.is_file():
                    tar.add(file, arcname=str(file.relative_to(root)))
            except FileNotFoundError:  # a temporary file that was renamed meanwhile
                continue
    return content.getvalue()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])))
