from __future__ import annotations

import shutil

import pytest
from lab import Lab, make_lab, with_three


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Lab:
    """A checkout with release 1.0 and an empty series."""
    monkeypatch.delenv("MPATCH_CACHE", raising=False)
    return make_lab(tmp_path)


@pytest.fixture(scope="session")
def _three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    with_three(make_lab(folder))
    return folder


@pytest.fixture
def three(_three, tmp_path, monkeypatch) -> Lab:
    """A checkout with three patches, applied. Made once and copied: the copy also shows that a checkout can move."""
    monkeypatch.delenv("MPATCH_CACHE", raising=False)
    shutil.copytree(_three, tmp_path / "copy", symlinks=True)
    return Lab(tmp_path / "copy" / "checkout", tmp_path / "copy" / "shelf")


HOSTILE = """
[apply]
    whitespace = fix
    ignoreWhitespace = change
[diff]
    noprefix = true
    mnemonicPrefix = true
    algorithm = patience
    context = 9
    interHunkContext = 20
    renames = copies
    external = false
    colorMoved = zebra
[format]
    signature = hostile
    subjectPrefix = HOSTILE
    signOff = true
    attach = true
[core]
    autocrlf = true
    eol = crlf
    safecrlf = true
    quotePath = true
    abbrev = 5
    pager = false
    hooksPath = {hooks}
    attributesFile = {attributes}
    excludesFile = {excludes}
    fsmonitor = false
    fileMode = false
[commit]
    gpgSign = true
    template = /nonexistent
[merge]
    conflictStyle = diff3
    renames = false
[init]
    templateDir = {hooks}
[i18n]
    commitEncoding = latin1
[color]
    ui = always
[user]
    useConfigOnly = true
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A home in which everything that can change git's bytes is set."""
    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for name in ("post-checkout", "pre-commit", "applypatch-msg", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {home}/hook-ran\nexit 1\n")
        (hooks / name).chmod(0o755)
    (home / "attributes").write_text("* text eol=crlf ident\n*.py diff=python filter=nope\n")
    (home / "excludes").write_text("*\n")
    (home / ".gitconfig").write_text(
        HOSTILE.format(hooks=hooks, attributes=home / "attributes", excludes=home / "excludes")
    )
    for key, value in {
        "HOME": str(home), "XDG_CONFIG_HOME": str(home), "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"),
        "GIT_EXTERNAL_DIFF": "false", "GIT_DIFF_OPTS": "-u7", "GIT_DIR": "/nonexistent/.git",
        "GIT_INDEX_FILE": "/nonexistent",
        "GIT_WORK_TREE": "/nonexistent", "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true", "LANG": "de_DE.UTF-8", "LC_ALL": "", "LANGUAGE": "de",
        "GIT_AUTHOR_DATE": "nonsense",
        "GIT_OBJECT_DIRECTORY": "/nonexistent", "GIT_NAMESPACE": "x", "GIT_LITERAL_PATHSPECS": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    return home
