"""A file from the package index that the user's pip or uv is set up for. Runs no foreign code, names no host.

`pip download` would run the sdist's build to learn its metadata (pip#1884), so the simple API is read directly:
PEP 691 (JSON) where the index offers it, else PEP 503 (HTML).
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any

from packaging.utils import canonicalize_name

from tools.mpatch.errors import FileNotOnIndex, IndexUnreachable
from tools.mpatch.files import temporary
from tools.mpatch.pinned import Progress, check
from tools.mpatch.pins import SdistBase

ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
# uv reads the first two, pip the third; the first that is set wins.
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
# Asked of pip at run time, so that this code names no host. The second form is pip's built-in default.
ASK_PIP_CONFIG = ("-m", "pip", "config", "--disable-pip-version-check", "list")
ASK_PIP_DEFAULT = ("-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)")
CHUNK_BYTES = 1 << 18
MOST_BYTES = 1 << 30  # of a release whose size nobody has pinned yet


@dataclass(frozen=True)
class IndexSource:
    """An index and how we came to it."""

    url: str
    reason: str


def configured_index() -> IndexSource:
    """Return the index that the user has configured: environment, pip's configuration, pip's own default.

    Raises:
        IndexUnreachable: no variable is set and this Python has no pip to ask.
    """
    for variable in INDEX_VARIABLES:
        if os.environ.get(variable):
            return IndexSource(os.environ[variable], f"environment variable {variable}")
    found = pip_index_setting(_ask(ASK_PIP_CONFIG))
    if found:
        return IndexSource(found, "pip's configuration")
    builtin = _ask(ASK_PIP_DEFAULT).strip()
    if builtin:
        return IndexSource(builtin, "pip's built-in default")
    raise IndexUnreachable(
        "no package index is configured",
        why=f"none of {', '.join(INDEX_VARIABLES)} is set and {sys.executable} has no pip to ask",
        remedy="set PIP_INDEX_URL, or: mpatch fetch --offline DIR",
    )


def pip_index_setting(listing: str) -> str:
    """Return index-url from the output of `pip config list`, empty when there is none.

    >>> pip_index_setting("global.cert='/x'\\nglobal.index-url='https://a.example/simple'")
    'https://a.example/simple'
    >>> pip_index_setting("global.extra-index-url='https://b.example/simple'")
    ''
    """
    match = re.search(r"^(?:global|install|download|:env:)\.index-url='([^']*)'", listing, re.MULTILINE)
    return match.group(1) if match else ""


def _ask(words: tuple[str, ...]) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout if done.returncode == 0 else ""


def download(base: SdistBase, target: Path, progress: Progress | None = None) -> IndexSource:
    """Bring the pinned file to `target`, which appears only after size and sha256 were right.

    Raises:
        IndexUnreachable: no index, or it does not answer.
        FileNotOnIndex: it lists no file of that name.
        DownloadMismatch: the file came and is another one; it is kept beside the target as `.rejected`.
    """
    source = configured_index()
    link = _link(source, base.package, base.filename)
    with temporary(target) as partial:
        with _open(link, "*/*", source) as answer, partial.open("wb") as out:
            _copy(answer, out, base.size_bytes, progress)
        check(base, partial, link, keep_as=target.with_name(target.name + ".rejected"))
    return source


def download_release(package: str, version: str, folder: Path) -> Path:
    """Bring the sdist of a release that is not pinned yet; return its file. The caller records what came."""
    source = configured_index()
    filename = f"{canonicalize_name(package).replace('-', '_')}-{version}.tar.gz"
    link = _link(source, package, filename)
    with temporary(folder / filename) as partial, _open(link, "*/*", source) as answer, partial.open("wb") as out:
        _copy(answer, out, MOST_BYTES, None)
    return folder / filename


def _link(source: IndexSource, package: str, filename: str) -> str:
    page = urllib.parse.urljoin(source.url.rstrip("/") + "/", canonicalize_name(package) + "/")
    with _open(page, ACCEPT, source) as answer:
        names = dict(links(answer.read(), answer.headers.get_content_type(), answer.geturl()))
    if filename not in names:
        raise FileNotOnIndex(
            f"the index has no {filename}",
            where=page,
            why=f"{len(names)} files are listed there; index from {source.reason}",
            remedy="check the pin in upstream.toml, or: mpatch fetch --offline DIR",
        )
    return names[filename]


def links(page: bytes, content_type: str, url: str) -> Iterator[tuple[str, str]]:
    """Yield (file name, absolute address) of a simple-API page.

    >>> list(links(b'{"files": [{"filename": "a-1.tar.gz", "url": "../a-1.tar.gz"}]}', "application/json",
    ...            "https://i.example/simple/a/"))
    [('a-1.tar.gz', 'https://i.example/simple/a-1.tar.gz')]
    >>> list(links(b'<a href="/f/a-1.tar.gz#sha256=0">a-1.tar.gz</a>', "text/html", "https://i.example/simple/a/"))
    [('a-1.tar.gz', 'https://i.example/f/a-1.tar.gz')]
    """
    if content_type.endswith("json"):
        for entry in json.loads(page)["files"]:
            yield entry["filename"], urllib.parse.urljoin(url, entry["url"])
        return
    parser = _Anchors()
    parser.feed(page.decode("utf-8", "replace"))
    for href in parser.found:
        address = urllib.parse.urljoin(url, urllib.parse.urldefrag(href).url)
        yield urllib.parse.unquote(Path(urllib.parse.urlparse(address).path).name), address


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the address of every anchor."""
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]


def _open(url: str, accept: str, source: IndexSource) -> Any:  # what urlopen gives has no one type
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": accept, "User-Agent": "mpatch"}
    if parts.username is not None:
        # urllib does not send credentials that stand in the address, as private indexes want them.
        import base64

        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or None
    try:
        context = ssl.create_default_context(cafile=bundle)
        request = urllib.request.Request(url, headers=headers)
        timeout = float(os.environ.get("PIP_DEFAULT_TIMEOUT", "60"))
        return urllib.request.urlopen(request, timeout=timeout, context=context)
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise IndexUnreachable(
            "the package index does not answer",
            where=url,
            why=f"{reason}; index from {source.reason}",
            remedy="check the network and PIP_INDEX_URL, or: mpatch fetch --offline DIR",
        ) from None


def _copy(answer: IO[bytes], out: IO[bytes], expected: int, progress: Progress | None) -> None:
    done = 0
    while chunk := answer.read(CHUNK_BYTES):
        out.write(chunk)
        done += len(chunk)
        if progress:
            progress(done, expected)
        if done > expected + CHUNK_BYTES:
            return  # longer than the pin: the check will refuse it, no need to fill the disk first
