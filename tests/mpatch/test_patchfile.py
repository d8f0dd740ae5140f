from __future__ import annotations

import pytest
from lab import FILES, plain_git, write_files
from unidiff import PatchSet

from tools.mpatch import errors, message
from tools.mpatch.patchfile import apply_change, blob_id, render, split
from tools.mpatch.patchread import parse


def parts(data: bytes) -> tuple[bytes, bytes]:
    at = data.index(b"\ndiff --git ") + 1
    return data[:at], data[at:]


def test_reads_what_git_format_patch_writes_and_writes_the_same_bytes(tmp_path):
    write_files(tmp_path, FILES)
    plain_git(tmp_path, "init", "-q")
    plain_git(tmp_path, "add", "-A")
    plain_git(tmp_path, "commit", "-qm", "base")
    (tmp_path / "fake/train.py").write_text(FILES["fake/train.py"].replace("done = 0", "done = 1"))
    (tmp_path / "fake/new.py").write_text("a = 1")
    (tmp_path / "fake/data.py").unlink(missing_ok=True)
    (tmp_path / "README.md").unlink()
    plain_git(tmp_path, "add", "-A")
    plain_git(tmp_path, "-c", "user.name=Jörg Ä", "commit", "-qF", "-", "--author", "Jörg Ä <j@x.example>",
              stdin="Change things\n\nBecause of ümlauts.\n\nScope: sdist\nProof: a::b\n")  # fmt: skip
    data = plain_git(tmp_path, "format-patch", "-1", "--stdout", "--full-index", "--zero-commit", "-N",
                     "--no-signature", "--no-stat", "--no-renames", "-U1").encode()  # fmt: skip
    patch = parse("a/b", data)
    assert patch.message.author == "Jörg Ä"
    assert patch.message.trailer("Proof") == "a::b"
    assert {change.path for change in patch.changes} == {"README.md", "fake/new.py", "fake/train.py"}
    # Only git's heading behind @@ is not kept: ours is the def path.
    assert render(patch) == data
    # A second opinion on the numbers, from the usual library.
    second = PatchSet(data.decode())
    assert [(one.path, one.added, one.removed) for one in second] == [
        (change.path, sum(h.added() for h in change.hunks), sum(h.removed() for h in change.hunks))
        for change in patch.changes
    ]


def test_exact_application_equals_git_apply(three, tmp_path):
    write_files(tmp_path / "t", FILES)
    plain_git(tmp_path / "t", "init", "-q")
    for slug in ("core/guard", "core/top-k", "core/top-k-more"):
        data = three.patch(slug)
        change = parse(slug, data).changes[0]
        ours = apply_change(change, (tmp_path / "t" / change.path).read_bytes(), slug)
        plain_git(tmp_path / "t", "apply", "-", stdin=parts(data)[1].decode())
        assert (tmp_path / "t" / change.path).read_bytes() == ours
        assert blob_id(ours) == change.new_id


def broken(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b"b/fake/core/loss.py\n@@", b"b/fake/core/../loss.py\n@@", errors.PathEscapes),
        (b"a/fake/core/loss.py b/fake/core/loss.py", b"a/../x b/../x", errors.PathEscapes),
        (b"a/fake/core/loss.py b/fake/core/loss.py", b"a//x b//x", errors.PathEscapes),
        (b"a/fake/core/loss.py b/fake/core/loss.py", b"a/.git/config b/.git/config", errors.PathEscapes),
        (b"a/fake/core/loss.py b/fake/core/loss.py", b"a/.GIT/x b/.GIT/x", errors.PathEscapes),
        (b" 100644\n", b" 120000\n", errors.PatchKindRefused),
        (b" 100644\n", b" 160000\n", errors.PatchKindRefused),
        (b"@@ -2,2 +2,2 @@", b"@@ -2,2 +2,3 @@", errors.PatchMalformed),
        (b"@@ -2,2 +2,2 @@", b"@@ nonsense @@", errors.PatchMalformed),
        (b"\nFrom: ", b"\nX-From: ", errors.PatchMalformed),
        (b"diff --git", b"diff --gut", errors.PatchMalformed),
    ],
)
def test_bad_patches_are_refused_by_their_own_error(three, old, new, error):
    with pytest.raises(error):
        parse("core/guard", broken(three.patch("core/guard"), old, new))


def test_cut_off_file_is_malformed(three):
    data = three.patch("core/guard")
    for length in range(len(data) - 1, 200, -7):
        with pytest.raises(errors.PatchMalformed):
            parse("core/guard", data[:length])


@pytest.mark.parametrize(
    ("text", "error"),
    [("", "empty"), ("a\nb\n", "more than one line"), ("a\n\nb\n---\nc\n", "cut"), ("a\n\ndiff --git x\n", "cut")],
)
def test_messages_that_could_not_be_carried(text, error):
    with pytest.raises(errors.MessageWrong, match=error):
        message.message(text)


def test_split_knows_only_newlines():
    assert split("a\x0bb\x0cc\u2028d\re\nf".encode()) == ["a\x0bb\x0cc\u2028d\re\n".encode(), b"f"]
