"""The one place that starts git, cut off from everything that a user or a machine may have configured."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mpatch.errors import GitFailed, GitTooOld

# Environment that git may see: how to find programs, temporary space, and the way through a proxy. Everything else
# (GIT_DIR of a surrounding hook, GIT_INDEX_FILE, HOME with its .gitconfig, EDITOR) would change what git does.
PASSED_ON = (
    "PATH",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "SYSTEMROOT",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTPS_PROXY",
    "NO_PROXY",
    "GIT_SSL_CAINFO",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)

ISOLATION = {
    "LC_ALL": "C",  # sorting and messages do not depend on the user's language
    "GIT_CONFIG_NOSYSTEM": "1",  # no /etc/gitconfig: core.autocrlf there changes bytes
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_GLOBAL": os.devnull,  # no ~/.gitconfig: apply.whitespace=fix, diff.noprefix, commit.gpgSign ...
    "GIT_ATTR_NOSYSTEM": "1",  # no system gitattributes: filters and eol rules change bytes
    "GIT_TERMINAL_PROMPT": "0",  # a prompt would hang CI for ever
    "GIT_ASKPASS": "true",  # ... also the graphical one
    "SSH_ASKPASS": "true",
    "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",  # ... and ssh's
    "GIT_EDITOR": "true",  # nothing we call may open an editor
    "GIT_PAGER": "cat",
    "GIT_OPTIONAL_LOCKS": "0",  # reading verbs write nothing, not even a refreshed index
    "GIT_NO_REPLACE_OBJECTS": "1",  # refs/replace would show other contents under the same id
    "GIT_MERGE_AUTOEDIT": "no",
    "GIT_AUTHOR_NAME": "mpatch",
    "GIT_AUTHOR_EMAIL": "mpatch@localhost",
    "GIT_COMMITTER_NAME": "mpatch",
    "GIT_COMMITTER_EMAIL": "mpatch@localhost",
    # Fixed dates: the same base and series always give the same commit ids.
    "GIT_AUTHOR_DATE": "@0 +0000",
    "GIT_COMMITTER_DATE": "@0 +0000",
}

SETTINGS = {
    "core.hooksPath": os.devnull,  # no hook of a template or a user runs
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.attributesFile": os.devnull,  # XDG attributes are not covered by GIT_ATTR_NOSYSTEM
    "core.excludesFile": os.devnull,  # a global ignore must not hide a foreign edit
    "core.fsmonitor": "false",  # starts a daemon that outlives us
    "core.quotePath": "false",
    "core.compression": "1",  # the tree is rebuilt from the pin at any time: speed before size
    "core.looseCompression": "1",
    "core.fsync": "none",  # same reason; what must survive a power cut is written by files.py
    "gc.auto": "0",  # a background gc could prune objects that only a scratch tree names yet
    "maintenance.auto": "false",
    "commit.gpgSign": "false",
    "safe.directory": "*",  # a CI container often owns the checkout as another user
    "diff.algorithm": "myers",  # exported bytes must not depend on the user's taste
    "diff.renames": "false",
    "merge.conflictStyle": "merge",
    "advice.detachedHead": "false",
    "init.defaultBranch": "patched",
}


@dataclass(frozen=True)
class Result:
    """What git answered."""

    code: int
    out: bytes
    err: bytes

    def text(self) -> str:
        """Return standard output as text without the last line end."""
        return self.out.decode("utf-8", "surrogateescape").rstrip("\n")


@dataclass(frozen=True)
class Repo:
    """A git directory, with its work tree when it has one. Nothing is ever discovered by walking up."""

    git_dir: Path
    work_tree: Path | None = None
    # Further object stores that may be read, e.g. a local clone looked at without copying it.
    alternates: tuple[Path, ...] = ()

    def run(
        self, *words: str, stdin: bytes = b"", ok: Sequence[int] = (0,), env: Mapping[str, str] | None = None
    ) -> Result:
        """Run git in this repository.

        Args:
            words: The command and its arguments.
            stdin: Bytes given to git; it never sees the caller's own standard input.
            ok: Exit statuses that are answers rather than failures.
            env: Further environment, e.g. GIT_INDEX_FILE.

        Raises:
            GitFailed: any other exit status.
        """
        extra = {"GIT_DIR": str(self.git_dir)}
        # Without a ceiling git would take a repository around us for its own, apply nothing, and exit 0.
        extra["GIT_CEILING_DIRECTORIES"] = str(self.git_dir.parent)
        if self.work_tree is not None:
            extra["GIT_WORK_TREE"] = str(self.work_tree)
        if self.alternates:
            extra["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = os.pathsep.join(map(str, self.alternates))
        return run_git(*words, cwd=self.work_tree or self.git_dir, stdin=stdin, ok=ok, env={**extra, **(env or {})})


def run_git(
    *words: str, cwd: Path, stdin: bytes = b"", ok: Sequence[int] = (0,), env: Mapping[str, str] | None = None
) -> Result:
    """Run git with nothing but our own settings; see `Repo.run`."""
    environment = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
    environment |= ISOLATION | {"HOME": os.devnull, "XDG_CONFIG_HOME": os.devnull} | dict(env or {})
    settings = [word for key, value in SETTINGS.items() for word in ("-c", f"{key}={value}")]
    command = ["git", "--no-pager", *settings, *words]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, cwd=cwd, env=environment, check=False)
    except FileNotFoundError:
        raise GitFailed(
            "git is not installed", why="no program called git on PATH", remedy="install git 2.38 or newer"
        ) from None
    if done.returncode not in ok:
        said = done.stderr.decode("utf-8", "replace").strip()[-600:]
        raise GitFailed(
            f"git {words[0]} ended with status {done.returncode}",
            where=str(cwd),
            why=f"git says: {said}" if said else "git says nothing",
            remedy="mpatch status shows what is left; nothing was half applied",
        )
    return Result(done.returncode, done.stdout, done.stderr)


def require_version(cwd: Path, minimum: tuple[int, int]) -> None:
    """Refuse a git that lacks what a verb needs.

    Raises:
        GitTooOld: with the version found.
    """
    words = run_git("version", cwd=cwd).text().split()
    found = tuple(int(part) for part in words[2].split(".")[:2])
    if found < minimum:
        raise GitTooOld(
            f"git {words[2]} is too old",
            why=f"this verb needs {minimum[0]}.{minimum[1]} or newer",
            remedy="install a newer git; fetch, apply, status and verify work with this one",
        )
