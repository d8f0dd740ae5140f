"""Fetching from an index, served on loopback as PEP 691 and PEP 503 say."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import threading

import pytest
from lab import release, sdist


class Index:
    """A package index: JSON or HTML pages, files, and a log of what was asked."""

    def __init__(self, files: dict[str, bytes], kind: str) -> None:
        self.files, self.kind, self.asked = files, kind, []
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                index.asked.append((self.path, self.headers.get("Authorization")))
                if self.path == "/simple/fake/":
                    return self.answer(*index.page())
                data = index.files.get(self.path.rpartition("/")[2])
                return self.answer("application/gzip", data) if data is not None else self.send_error(404)

            def answer(self, kind, data):
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def page(self) -> tuple[str, bytes]:
        if self.kind == "json":
            files = [{"filename": name, "url": f"../../files/{name}", "hashes": {}} for name in self.files]
            return "application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()
        rows = "".join(f'<a href="../../files/{name}#sha256=0">{name}</a><br>' for name in self.files)
        return "text/html", f"<!DOCTYPE html><html><body>{rows}</body></html>".encode()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/simple"


@contextlib.contextmanager
def serving(files, kind, monkeypatch, credentials=""):
    index = Index(files, kind)
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("http://", f"http://{credentials}"))
    try:
        yield index
    finally:
        index.server.shutdown()
        index.server.server_close()


@pytest.fixture
def good():
    return {"fake-1.0.tar.gz": sdist(release("1.0"), "1.0"), "fake-0.9.tar.gz": b"old"}


@pytest.mark.parametrize("kind", ["json", "html"])
def test_fetch_from_the_configured_index(lab, good, kind, monkeypatch):
    with serving(good, kind, monkeypatch) as index:
        assert "PIP_INDEX_URL" in lab.good("fetch").out
        assert [path for path, _ in index.asked] == ["/simple/fake/", "/files/fake-1.0.tar.gz"]
        lab.good("fetch")
        assert len(index.asked) == 2  # the store has it: nothing is asked again
    assert lab.good("apply").code == 0


def test_credentials_in_the_address_are_sent_as_a_header(lab, good, monkeypatch):
    with serving(good, "json", monkeypatch, credentials="me:pass%40word@") as index:
        lab.good("fetch")
        assert index.asked[0][1] == "Basic bWU6cGFzc0B3b3Jk"


def test_pip1884_download_runs_no_build(lab, good, monkeypatch):
    """pip#1884: download ran the sdist's build; the fake setup.py would stop this process."""
    with serving(good, "json", monkeypatch):
        lab.good("fetch")
    lab.good("apply")
    assert "a build ran while fetching" in (lab.tree / "setup.py").read_text()


def test_wrong_hash_prints_both_keeps_the_file_and_unpacks_nothing(lab, monkeypatch):
    other = sdist(release("clean"), "1.0")
    with serving({"fake-1.0.tar.gz": other}, "json", monkeypatch):
        said = lab.run("fetch")
    assert said.code == 1
    assert "DownloadMismatch" in said.err
    assert f"actual   {len(other)} bytes" in said.err
    assert (lab.root / "build/cache/fake-1.0.tar.gz.rejected").read_bytes() == other
    assert not (lab.root / "build/cache/fake-1.0.tar.gz").exists()
    assert not lab.tree.exists()


def test_endless_file_is_cut_short(lab, monkeypatch):
    with serving({"fake-1.0.tar.gz": b"x" * 5_000_000}, "json", monkeypatch):
        assert "DownloadMismatch" in lab.run("fetch").err
    assert (lab.root / "build/cache/fake-1.0.tar.gz.rejected").stat().st_size < 1_500_000


def test_file_that_the_index_lacks(lab, monkeypatch):
    with serving({"fake-0.9.tar.gz": b"old"}, "html", monkeypatch):
        said = lab.run("fetch")
    assert said.code == 2
    assert "FileNotOnIndex" in said.err


def test_index_that_does_not_answer(lab, monkeypatch):
    with serving({}, "json", monkeypatch) as index:
        url = index.url
    monkeypatch.setenv("PIP_INDEX_URL", url)
    said = lab.run("fetch", "--json")
    assert said.code == 2
    assert said.data["error"] == "IndexUnreachable"


def test_offline_folder_and_its_absence(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    said = lab.run("apply", "--offline", str(tmp_path))
    assert said.code == 2
    assert "BaseMissing" in said.err
    lab.apply()


def test_wrong_file_in_the_offline_folder_is_left_where_it_is(lab):
    (lab.shelf / "fake-1.0.tar.gz").write_bytes(b"not it")
    said = lab.run("apply", "--offline", str(lab.shelf))
    assert said.code == 1
    assert "DownloadMismatch" in said.err
    assert (lab.shelf / "fake-1.0.tar.gz").read_bytes() == b"not it"


def test_damaged_cache_is_kept_aside_and_fetched_again(lab, good, monkeypatch):
    cache = lab.root / "build/cache"
    cache.mkdir(parents=True)
    (cache / "fake-1.0.tar.gz").write_bytes(b"half")
    with serving(good, "json", monkeypatch):
        lab.good("fetch")
    assert (cache / "fake-1.0.tar.gz.rejected").read_bytes() == b"half"


def test_cache_is_shared_between_checkouts(lab, good, tmp_path, monkeypatch):
    monkeypatch.setenv("MPATCH_CACHE", str(tmp_path / "shared"))
    with serving(good, "json", monkeypatch) as index:
        lab.good("fetch")
        shutil.rmtree(lab.root / "build")
        lab.good("fetch")
        assert len(index.asked) == 2


def test_no_index_host_is_named_in_the_code():
    from lab import REPOSITORY

    word = "pypi" + ".org"
    folders = [REPOSITORY / "tools", REPOSITORY / "megatron_ext", REPOSITORY / "docs"]
    named = [path for folder in folders for path in folder.rglob("*.*") if path.is_file() and path.suffix != ".pyc"
             and word.encode() in path.read_bytes()]  # fmt: skip
    assert named == []


def test_record_pins_a_release_of_the_index_a_file_and_a_clone(three, tmp_path, monkeypatch):
    from lab import plain_git, tree_of, write_files

    files = release("moved")
    with serving({"fake-2.0.tar.gz": sdist(files, "2.0")}, "json", monkeypatch):
        said = three.good("fetch", "--record", "next", "fake==2.0", "--json")
    assert said.data["tree"] == tree_of(files)
    (tmp_path / "fake-3.0.tar.gz").write_bytes(sdist(release("clean"), "3.0"))
    three.good("fetch", "--record", "later", str(tmp_path / "fake-3.0.tar.gz"))
    write_files(tmp_path / "clone", files)
    plain_git(tmp_path / "clone", "init", "-q")
    plain_git(tmp_path / "clone", "add", "-A")
    plain_git(tmp_path / "clone", "commit", "-qm", "x")
    assert three.good("fetch", "--record", "full", f"{tmp_path}/clone@HEAD", "--json").data["tree"] == tree_of(files)
    three.good("rebase", "--onto", "next")
    assert three.good("verify").code == 0
    three.good("drift", "later", "full", "--json")
    assert three.run("fetch", "--record", "next", "fake==2.0").code == 64
    assert three.run("fetch", "--record", "other", "nothing").code == 2
