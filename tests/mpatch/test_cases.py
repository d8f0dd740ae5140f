"""Every row of the case table: the reports of other patch queues' users, reproduced. Named after the report."""

from __future__ import annotations

import os
import pty
import shutil
import socket
import subprocess
import sys
import threading

import pytest
from lab import FILES, REPOSITORY, make_lab, plain_git, release, tree_of, with_three, write_files

from tools.mpatch.cli import VERBS
from tools.mpatch.message import message, parse, render


def edit_patch(lab, slug, old, new):
    path = lab.root / "patches" / f"{slug}.patch"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize("report", ["bun35099", "rattler_build1670", "kata_containers3690", "wine_staging7"])
def test_tree_inside_another_repository(report, lab):
    """exit 0, nothing applied"""
    plain_git(lab.root.parent, "init", "-q")
    plain_git(lab.root, "init", "-q")
    if report in ("kata_containers3690", "wine_staging7"):  # as the checkout mostly is: build/ ignored by it
        (lab.root / ".gitignore").write_text("build/\n")
        plain_git(lab.root, "add", "-A")
        plain_git(lab.root, "commit", "-qm", "outer")
    lab.apply()
    lab.add_patch("core/guard", "fake/core/loss.py", "len(values)", "max(len(values), 1)")
    shutil.rmtree(lab.root / "build")
    lab.apply()
    assert "max(len(values), 1)" in (lab.tree / "fake/core/loss.py").read_text()
    assert lab.good("verify").code == 0


def test_openwa987_patch_package191_vcpkg1031_crlf_checkout(three):
    """corrupt patch at line 7"""
    path = three.root / "patches/core/guard.patch"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = three.snapshot("build/megatron")
    said = three.run("apply")
    assert said.code == 1
    assert "PatchHasCRLF" in said.err
    assert "patches/core/guard.patch" in said.err
    assert "*.patch -text" in said.err
    assert three.snapshot("build/megatron") == before


def test_slime1042_electron20299_upstream_moved(three):
    """Lists all that no longer fit at once, with the kind of conflict of each."""
    files = release("clean")
    files["fake/core/loss.py"] = "def loss(values):\n    return 0\n"
    del files["fake/core/router.py"]
    three.add_base("2.0", files)
    said = three.run("drift", "2.0", "--offline", str(three.shelf), "--json")
    assert said.code == 1
    fates = {fate["slug"]: fate["state"] for fate in said.data["bases"][0]["fates"]}
    assert fates == {"core/guard": "conflict", "core/top-k": "file-gone", "core/top-k-more": "file-gone"}
    said = three.run("apply", "--base", "2.0", "--offline", str(three.shelf))
    assert said.code == 1
    assert "3 patches do not fit" in said.err
    assert "fake/core/loss.py:2" in said.err
    assert "the file is not there" in said.err


def git_base(lab, folder, files, tree):
    """Pin a commit of a clone."""
    write_files(folder, files)
    plain_git(folder, "init", "-q")
    plain_git(folder, "add", "-A")
    plain_git(folder, "commit", "-qm", "x")
    commit = plain_git(folder, "rev-parse", "HEAD").strip()
    pins = lab.root / "upstream.toml"
    pins.write_text(pins.read_text() + f'\n[bases.full]\nkind = "git"\nrepository = "x/y"\ncommit = "{commit}"\n'
                    f'tree = "{tree}"\n')  # fmt: skip
    return commit


def test_vscodium1715_tag_points_elsewhere(three, tmp_path):
    """Commit and tree mismatch before any patching."""
    git_base(three, tmp_path / "clone", release("clean"), tree_of(release("1.0")))
    before = three.snapshot("build/megatron")
    said = three.run("apply", "--base", "full", "--from", str(tmp_path / "clone"))
    assert said.code == 1
    assert "BaseMismatch" in said.err
    assert three.snapshot("build/megatron") == before


def test_git_base_applies_from_a_clone_and_the_unpinned_tree_is_said(three, tmp_path):
    git_base(three, tmp_path / "clone", release("clean"), "")
    said = three.good("apply", "--base", "full", "--from", str(tmp_path / "clone"))
    assert "unchecked" in said.out
    assert "unchecked" in three.run("status").out


def test_vscodium974_wrong_checkout(three):
    """base is A, pin is B; nothing tried"""
    pins = three.root / "upstream.toml"
    wrong = tree_of(release("clean"))
    pins.write_text(pins.read_text().replace(tree_of(FILES), wrong))
    said = three.run("apply", "--offline", str(three.shelf))
    assert said.code == 1
    assert f"base is {tree_of(FILES)}" in said.err
    assert f"pin is  {wrong}" in said.err
    assert "no patch was tried" in said.err


def test_vscodium797_composer_patches40_primus375_every_verb_fails_with_a_status(three, tmp_path):
    """failure but exit 0"""
    edit_patch(three, "core/guard", b"@@ -2,2 +2,2 @@", b"@@ -2,2 +2,9 @@")
    arguments = {
        "show": ["core/guard"], "new": ["core/x"], "edit": ["guard"], "drop": ["guard", "--because", "x"],
        "rebase": ["--onto", "1.0"], "drift": ["1.0"], "upstream-prep": ["guard", "--clone", str(tmp_path)],
        "fetch": ["--base", "none"], "doctor": ["--python", "/nonexistent"], "bundle": [str(tmp_path / "b")],
    }  # fmt: skip
    for verb in VERBS:
        said = three.run(verb, *arguments.get(verb, []))
        assert said.code in (1, 2), (verb, said)
        assert said.err.startswith("error: "), (verb, said)
        assert three.run(verb, "--no-such-option").code == 64


def test_pnpm9160_version_bump_made_a_patch_vanish(three):
    """A patch that matches nothing is an error."""
    files = release("clean")
    del files["fake/core/loss.py"]
    three.add_base("2.0", files)
    said = three.run("apply", "--base", "2.0", "--offline", str(three.shelf))
    assert said.code == 1
    assert "PreimageMismatch" in said.err
    (three.root / "patches/core/guard.patch").unlink()
    assert "SeriesWrong" in three.run("apply").err
    (three.root / "patches/series").unlink()
    assert three.run("apply").code == 1


def test_python_patch_ng19_toybox533_fuzz_is_impossible(three):
    """A hunk was put where most of its context fits."""
    files = release("clean")
    files["fake/core/loss.py"] = FILES["fake/core/loss.py"].replace("# mean", "# the mean")
    three.add_base("2.0", files)
    said = three.run("apply", "--base", "2.0", "--offline", str(three.shelf))
    assert said.code == 1
    assert "ContextMismatch" in said.err
    assert "fake/core/loss.py:2 in loss" in said.err
    assert "'    # mean'" in said.err


def test_slime_latest_hand_edited_hunk(three):
    """A widely used Megatron patch has one; every tool accepts it in silence."""
    edit_patch(three, "core/guard", b"max(len(values), 1)", b"max(len(values), 2)")
    before = three.snapshot("build/megatron")
    said = three.run("apply")
    assert said.code == 1
    assert "PostimageMismatch" in said.err
    assert "edited by hand" in said.err
    assert three.snapshot("build/megatron") == before


def test_rules_pycross202_nothing_done_reported_done(lab, tmp_path, monkeypatch):
    """The post-condition counts: here is a git that says yes and writes nothing."""
    real = shutil.which("git")
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\nfor word in "$@"; do [ "$word" = -u ] && exit 0; done\nexec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    said = lab.run("apply", "--offline", str(lab.shelf))
    assert said.code == 1
    assert "VerifyFailed" in said.err
    assert not lab.tree.exists()


def test_electron14147_sonic_buildimage14662_second_run(three):
    """The second run failed; here it says so, writes nothing, exits 0."""
    before = three.snapshot()
    assert "already applied (3 of 3)" in three.good("apply").out
    assert three.snapshot() == before


def test_ffmpeg_windows_build_helpers336_a_prompt_hangs_ci(three, tmp_path):
    """On a silent terminal a source that asks for a password ends in time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = (
            "HTTP/1.1 401 Unauthorized",
            'WWW-Authenticate: Basic realm="x"',
            "Content-Length: 0",
            "Connection: close",
        )
        answer = "\r\n".join([*head, "", ""]).encode()

        def serve():
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                link.recv(65536)
                link.sendall(answer)
                link.close()

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x/y"
        git_base(three, tmp_path / "clone", release("clean"), "")
        silent, terminal = pty.openpty()
        env = {**os.environ, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-m", "tools.mpatch", "fetch", "--root", str(three.root), "--base", "full", "--from", url],
            stdin=terminal, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, env=env, check=False,
        )  # fmt: skip
        os.close(silent), os.close(terminal)
    assert done.returncode == 2
    assert "BaseMissing" in done.stderr


def test_saltstack59806_malformed_is_not_already_applied(three):
    edit_patch(three, "core/guard", b"@@ -2,2", b"@@ -2,")
    said = three.run("apply")
    assert said.code == 1
    assert "PatchMalformed" in said.err
    assert "already" not in said.out


def test_nixpkgs257446_brew2837_short_ids(three):
    """Abbreviated ids change with the size of the repository."""
    line = next(row for row in three.patch("core/guard").split(b"\n") if row.startswith(b"index "))
    edit_patch(three, "core/guard", line, line[:16] + b".." + line[48:58] + b" 100644")
    said = three.run("apply")
    assert "PatchMalformed" in said.err
    assert "short blob ids" in said.err


def test_electron50121_papermc2324_export_depends_on_user_config(tmp_path, three, hostile):
    """Identical bytes, whatever the user's git is told."""
    lab = with_three(make_lab(tmp_path / "hostile"))
    for slug in ("core/guard", "core/top-k", "core/top-k-more"):
        ours, theirs = lab.patch(slug).split(b"\n"), three.patch(slug).split(b"\n")
        assert [line for line in ours if not line.startswith(b"Date: ")] == [
            line for line in theirs if not line.startswith(b"Date: ")
        ]
    assert lab.good("verify").code == 0
    assert lab.good("check", "round-trip", "alone").code == 0
    lab.add_base("moved", release("moved"))
    lab.good("rebase", "--onto", "moved", "--offline", str(lab.shelf))
    assert not (hostile / "hook-ran").exists()


def test_uv10579_site_packages_is_refused(tmp_path):
    """Editing an installed file edits the cache that all environments link to."""
    lab = make_lab(tmp_path / "lib" / "python3.12" / "site-packages" / "dist")
    said = lab.run("apply", "--offline", str(lab.shelf))
    assert said.code == 1
    assert "InstalledPackage" in said.err
    assert not lab.tree.exists()


@pytest.mark.parametrize(
    "text",
    [
        "[tag] Keep tags\n\nBody.\n\nScope: sdist\n",
        "Re: keep this\n\n- a list\n- of two\n\n  indented: text\n\nScope: sdist\nDepends-On: a/b,\n c/d\n",
        "Dashes -- and --- inside\n\nA line with --- inside\n ---\n\nScope: x\n",
        "No trailers at all\n\nJust text\nwith: a colon\nand more",
        "Ümlaut ß subject\n\nBody with 日本語.\n\nReason: ünlike\n",
    ],
)
def test_smuxi145_stgit_message_in_is_message_out(text):
    """The subject was altered, the trailers cut at ---"""
    said = message(text, author="Å B", email="a@b.example", date="Sun, 29 Nov 2026 17:45:05 +0000")
    again = parse(render(said), "x")
    assert again == said
    assert again.text().rstrip() == text.rstrip()


def test_zephyr97778_editor_stripped_blank_context_lines(three):
    three.add_patch("core/data", "fake/core/data.py", "    return 3\n\n", "    return 33\n\n")
    data = three.patch("core/data")
    assert b"\n \n" in data
    (three.root / "patches/core/data.patch").write_bytes(data.replace(b"\n \n", b"\n\n"))
    said = three.run("apply")
    assert "PatchContextStripped" in said.err
    assert "mpatch refresh" in said.err


def test_ungoogled_chromium_windows85_hunk_failure_as_a_traceback(three):
    edit_patch(three, "core/guard", b"     # mean", b"     # nope")
    done = three.process("apply")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "try:" in done.stderr


def test_trop405_cve_2026_47712_path_escape(three):
    edit_patch(three, "core/guard", b"diff --git a/fake/core/loss.py b/fake/core/loss.py",
               b"diff --git a/../../escaped.py b/../../escaped.py")  # fmt: skip
    said = three.run("apply")
    assert "PathEscapes" in said.err
    assert not (three.root / "escaped.py").exists()
