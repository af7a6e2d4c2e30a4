"""Collect the text of the Python standard library and its documentation, split by file.

A file is held out by the hash of its relative path: the split is the same on every machine. `encodings/` is left out:
its tables are near-duplicates of each other and would leak across the split.
Licence of both sources: Python Software Foundation License 2.0 (https://docs.python.org/3/license.html).
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 5
MAX_FILE_BYTES = 400_000  # larger files are generated tables
DOC_FOLDERS = ("/usr/share/doc/python3.11/html/_sources", "/usr/share/doc/python3/html/_sources")
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
SKIPPED_FOLDERS = frozenset({"encodings", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text of the corpus.

    Attributes:
        name: Path relative to its source, the key of the split.
        kind: "code", "test" (the library's own tests) or "docs".
        text: The whole text.
        held_out: True when it may only be used for evaluation.
    """

    name: str
    kind: str
    text: str
    held_out: bool


def is_held_out(name: str) -> bool:
    """Tell whether a file belongs to evaluation, from the SHA-256 of its name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def standard_library() -> list[Document]:
    """Read every `.py` file of the running interpreter's library, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        text = _read(path)
        if text is None:
            continue
        kind = "test" if TEST_FOLDERS & set(relative.parts) else "code"
        if relative.parts[0] == "pydoc_data":
            kind = "docs"
        name = relative.as_posix()
        documents.append(Document(name=name, kind=kind, text=text, held_out=is_held_out(name)))
    return documents


def documentation() -> list[Document]:
    """Read the reStructuredText sources of the Python manual where Debian's `python3-doc` put them; [] without it."""
    for folder in map(Path, DOC_FOLDERS):
        if folder.is_dir():
            named = [(path.relative_to(folder).as_posix(), _read(path)) for path in sorted(folder.rglob("*.txt"))]
            return [
                Document(name=name, kind="docs", text=text, held_out=is_held_out(name))
                for name, text in named
                if text is not None
            ]
    return []


def _read(path: Path) -> str | None:
    """Give a file's text, or None when it is no UTF-8, nearly empty, or a large table."""
    data = path.read_bytes()
    if not 200 < len(data) < MAX_FILE_BYTES and path.parent.name != "pydoc_data":
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:  # the library's tests hold files that are broken on purpose
        return None
