"""Golden error texts: what, where, why, the next command. `MPATCH_GOLDEN=write` rewrites the files; read the diff."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import Lab, release

from tools.mpatch import errors

GOLDEN = Path(__file__).with_name("golden")


def rewrite(lab: Lab, slug: str, old: bytes, new: bytes) -> None:
    path = lab.root / "patches" / f"{slug}.patch"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def pins(lab: Lab, old: str, new: str) -> None:
    path = lab.root / "upstream.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def base(lab: Lab, **files: str | None) -> None:
    content = release("clean")
    for name, text in files.items():
        path = f"fake/core/{name}.py"
        content.pop(path)
        if text is not None:
            content[path] = text
    lab.add_base("2.0", content)


def after(change: Callable[[Lab], object], *words: str) -> Callable[[Lab], tuple[str, ...]]:
    def run(lab: Lab) -> tuple[str, ...]:
        change(lab)
        return tuple(word.replace("SHELF", str(lab.shelf)) for word in words)

    return run


ONTO = ("rebase", "--onto", "2.0", "--offline", "SHELF")

CASES: dict[str, Callable[[Lab], tuple[str, ...]]] = {
    "UsageError": after(lambda lab: None, "new", "Not_A_Slug"),
    "PinsUnreadable": after(lambda lab: pins(lab, "sha256", "sha265"), "apply"),
    "BaseMissing": after(lambda lab: None, "apply", "--base", "none"),
    "SeriesWrong": after(lambda lab: (lab.root / "patches/core/guard.patch").unlink(), "apply"),
    "SeriesMissing": after(lambda lab: (lab.root / "patches/series").unlink(), "status"),
    "SnapshotUnreadable": after(lambda lab: None, "release-notes", "--to", "v9"),
    "PatchMalformed": after(lambda lab: rewrite(lab, "core/guard", b"@@ -2,2", b"@@ -2,5"), "apply"),
    "PatchHasCRLF": after(lambda lab: rewrite(lab, "core/guard", b"\n", b"\r\n"), "apply"),
    "PathEscapes": after(lambda lab: rewrite(lab, "core/guard", b"fake/core/loss.py", b"../loss.py"), "apply"),
    "PatchKindRefused": after(lambda lab: rewrite(lab, "core/guard", b" 100644", b" 120000"), "apply"),
    "PostimageMismatch": after(lambda lab: rewrite(lab, "core/guard", b", 1)", b", 2)"), "apply"),
    "ContextMismatch": after(lambda lab: rewrite(lab, "core/guard", b"# mean", b"# men"), "apply"),
    "PreimageMismatch": after(lambda lab: base(lab, loss=None), "apply", "--base", "2.0", "--offline", "SHELF"),
    "SeriesDoesNotApply": after(
        lambda lab: base(lab, loss=None, router="x = 1\n"), "apply", "--base", "2.0", "--offline", "SHELF"
    ),
    "ForeignEdits": after(lambda lab: lab.replace("fake/train.py", "done = 0", "done = 9"), "apply"),
    "NothingToRefresh": after(lambda lab: lab.good("edit", "guard"), "refresh"),
    "NoEditOpen": after(lambda lab: lab.replace("fake/train.py", "done = 0", "done = 9"), "refresh"),
    "EditOpen": after(lambda lab: lab.good("edit", "guard"), "rebase", "--onto", "1.0"),
    "TreeMissing": after(lambda lab: rewrite(lab, "core/guard", b"Change core", b"Changed core"), "edit", "guard"),
    "VerifyFailed": after(lambda lab: (lab.tree / "fake/train.py").unlink(), "verify"),
    "StateUnreadable": after(lambda lab: (lab.tree / ".git/mpatch.json").unlink(), "apply"),
    "MessageWrong": after(lambda lab: (lab.root / "m").write_text("a\nb\n"), "new", "a/b", "--message", "M"),
    "MoveConflict": after(lambda lab: base(lab, loss="def loss(values):\n    return 0\n"), *ONTO),
    "WrongPlace": after(
        lambda lab: base(lab, router=release("clean")["fake/core/router.py"].replace("TopKRouter", "BestRouter")), *ONTO
    ),
    "PatchAbsorbed": after(lambda lab: base(lab, loss=release("absorbed")["fake/core/loss.py"]), *ONTO),
    "LintFailed": after(lambda lab: None, "check", "lint"),
    "DownloadMismatch": after(
        lambda lab: (lab.shelf / "fake-1.0.tar.gz").write_bytes(b"x"), "fetch", "--offline", "SHELF"
    ),
    "BaseMismatch": after(
        lambda lab: (lab.root / "upstream.toml").write_text(
            re.sub(r'tree = ".{40}"', f'tree = "{"0" * 40}"', (lab.root / "upstream.toml").read_text())
        ),
        "fetch",
        "--offline",
        "SHELF",
    ),
}
# Shown by tests of their own, where their situation is made.
ELSEWHERE = {
    "MpatchError", "CouldNotCheck", "IndexUnreachable", "FileNotOnIndex", "GitFailed", "GitTooOld", "NothingChecked",
    "Busy", "DiskRefused", "ArchiveUnsafe", "PatchContextStripped", "ProofFailed", "StyleWrong", "InstalledPackage",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_text(name, three):
    words = [word.replace("M", str(three.root / "m")) if word == "M" else word for word in CASES[name](three)]
    said = three.run(*words)
    assert said.code != 0
    text = said.err.replace(str(three.root), "ROOT").replace(str(three.shelf), "SHELF")
    assert re.match(r"error: [^\n]+ \[\w+\]\n", text)
    assert "\ntry:   " in text, "every error names the next command"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("MPATCH_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_every_error_class_has_a_text_or_a_test():
    classes = {name for name, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.MpatchError)}
    shown = {re.search(r"\[(\w+)\]", path.read_text())[1] for path in GOLDEN.glob("*.txt")}
    assert classes == shown | ELSEWHERE
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    abstract = {"MpatchError", "CouldNotCheck"}
    assert [name for name in ELSEWHERE - abstract if tests.count(name) < 2] == [], "shown nowhere"


def test_archive_with_an_escape_and_with_a_link(lab):
    """ArchiveUnsafe: refused although the hash is the pinned one."""
    import gzip
    import hashlib
    import io
    import tarfile

    for member, kind in (("fake-1.0/../../up.py", tarfile.REGTYPE), ("fake-1.0/link", tarfile.SYMTYPE)):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            entry = tarfile.TarInfo(member)
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry, io.BytesIO())
        data = gzip.compress(out.getvalue(), mtime=0)
        (lab.shelf / "fake-1.0.tar.gz").write_bytes(data)
        text = re.sub(r"size_bytes = \d+", f"size_bytes = {len(data)}", (lab.root / "upstream.toml").read_text())
        text = re.sub(r'sha256 = "\w+"', f'sha256 = "{hashlib.sha256(data).hexdigest()}"', text)
        (lab.root / "upstream.toml").write_text(text)
        said = lab.run("apply", "--offline", str(lab.shelf))
        assert said.code == 1
        assert "ArchiveUnsafe" in said.err
        assert not lab.tree.exists()


def test_old_git_can_apply_but_not_move(three, tmp_path, monkeypatch):
    """GitTooOld: 2.37 has no merge-tree --write-tree."""
    import shutil

    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/sh\nfor word in "$@"; do [ "$word" = version ] && echo git version 2.37.1 && exit; done\n'
        f'exec {shutil.which("git")} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    three.add_base("clean", release("clean"))
    said = three.run("rebase", "--onto", "clean", "--offline", str(three.shelf))
    assert said.code == 2
    assert "GitTooOld" in said.err
    assert three.good("apply").code == 0


def test_json_error_is_json_on_stdout_and_text_on_stderr(three):
    said = three.run("apply", "--base", "none", "--json")
    assert said.data["error"] == "BaseMissing"
    assert said.data["exit_code"] == said.code == 2
    assert "error:" in said.err


def test_git_that_fails_is_quoted_and_not_interpreted(three, tmp_path, monkeypatch):
    """GitFailed: whatever it says, in whatever language, only the status counts."""
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'Erfolg, alles gut' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    said = three.run("verify")
    assert said.code == 2
    assert "GitFailed" in said.err
    assert "status 3" in said.err
    assert "git says: Erfolg, alles gut" in said.err
