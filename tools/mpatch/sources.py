"""Bases: from a pin to a verified tree in the store. Nothing is unpacked before it was verified."""

from __future__ import annotations

import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import ArchiveUnsafe, BaseMismatch, BaseMissing, DownloadMismatch, GitFailed
from tools.mpatch.files import temporary
from tools.mpatch.git import Repo
from tools.mpatch.patchread import check_path
from tools.mpatch.pinned import Progress, check
from tools.mpatch.pins import Base, GitBase, SdistBase
from tools.mpatch.store import Store


@dataclass(frozen=True)
class Fetched:
    """A base that is in the store. `checked` is false where no tree id is pinned to compare with."""

    tree: str
    source: str
    checked: bool


def fetch(
    checkout: Checkout,
    base: Base,
    *,
    offline: Path | None = None,
    origin: str = "",
    progress: Progress | None = None,
) -> Fetched:
    """Bring a base into the store, from there if it has it already.

    Args:
        offline: A folder that holds the sdist; the index is not asked then.
        origin: A clone or address to take a git base from.

    Raises:
        DownloadMismatch, ArchiveUnsafe, BaseMismatch: what came is not what is pinned.
        BaseMissing, IndexUnreachable, FileNotOnIndex: it cannot be had here.
    """
    store = checkout.store()
    if base.tree and offline is None and not origin and store.has_tree(base.tree):
        return Fetched(base.tree, "already in the store", True)
    if isinstance(base, SdistBase):
        path, source = sdist_file(checkout, base, offline, progress)
        tree = store.import_files(sdist_files(path))
    else:
        source = origin or base.url
        tree = _fetch_commit(store, base, source)
    if base.tree and tree != base.tree:
        raise BaseMismatch(
            "the files are not the pinned ones; no patch was tried",
            where=source,
            why=f"base is {tree}\npin is  {base.tree}",
            remedy=f"check [bases.{base.name}] in upstream.toml",
        )
    store.keep(tree)
    return Fetched(tree, source, bool(base.tree))


def sdist_file(
    checkout: Checkout, base: SdistBase, offline: Path | None, progress: Progress | None
) -> tuple[Path, str]:
    """Return the verified sdist in the cache and where it came from."""
    target = checkout.cache / base.filename
    if offline is not None:
        given = offline / base.filename
        if not given.is_file():
            raise BaseMissing(
                f"the folder has no {base.filename}",
                where=str(offline),
                remedy=f"put the file there (sha256 {base.sha256})",
            )
        check(base, given, str(given))
        with temporary(target) as partial:
            shutil.copyfile(given, partial)
            check(base, partial, str(given))  # the copy is what counts: the folder may be on a network
        return target, str(given)
    if target.is_file():
        try:
            check(base, target, str(target), keep_as=target.with_name(target.name + ".rejected"))
            return target, f"cache {target}"
        except DownloadMismatch:
            pass  # kept aside; a damaged cache is no reason to fail while the index has the file
    from tools.mpatch import index  # loads ssl and urllib, which only a download needs

    source = index.download(base, target, progress)
    return target, f"package index ({source.reason})"


_NOWHERE = "/nonexistent/unpacked"


def sdist_files(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return mode and content of each file of an sdist, without its top folder. Runs nothing, writes nothing.

    Raises:
        ArchiveUnsafe: a path leaves the archive, or a member is no plain file.
    """
    found: dict[str, tuple[str, bytes]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isdir():
                continue
            try:
                # The library's own judgement of absolute paths, `..`, links and devices. It may look at the folder that
                # it is told, so that must be none: below a file newer Pythons raise.
                tarfile.data_filter(member, _NOWHERE)
                stream = archive.extractfile(member) if member.isreg() else None
            except (tarfile.FilterError, KeyError) as error:
                raise ArchiveUnsafe(
                    "the archive holds an unsafe member",
                    where=f"{path}: {member.name}",
                    why=str(error),
                    remedy="do not use this archive; the pin must be wrong",
                ) from None
            if stream is None:
                raise ArchiveUnsafe(
                    "the archive holds a link or a device",
                    where=f"{path}: {member.name}",
                    remedy="do not use this archive; the pin must be wrong",
                )
            name = check_path(member.name.partition("/")[2], str(path))
            found[name] = ("100755" if member.mode & 0o100 else "100644", stream.read())
    return found


def _fetch_commit(store: Store, base: GitBase, source: str) -> str:
    if not source:
        raise BaseMissing(
            f"no source for {base.describe()}",
            where=f"[bases.{base.name}]",
            why="the pin names no url",
            remedy=f"mpatch fetch --base {base.name} --from PATH_OF_A_CLONE",
        )
    return fetch_commit(store, source, base.commit)


def fetch_commit(store: Store, source: str, revision: str) -> str:
    """Copy one commit of a clone or address into the store; return its tree id.

    Raises:
        BaseMissing: it does not have the commit, or cannot be reached.
    """
    address = Path(source).resolve().as_uri() if Path(source).exists() else source
    try:
        store.repo.run(
            "fetch",
            "-q",
            "--no-tags",
            "--depth=1",
            "--no-write-fetch-head",
            "--no-recurse-submodules",
            address,
            f"+{revision}:refs/mpatch/fetched",
        )
        return store.repo.run("rev-parse", "refs/mpatch/fetched^{tree}").text()
    except GitFailed as error:
        raise BaseMissing(
            f"{revision} could not be fetched",
            where=source,
            why=error.why,
            remedy="name another clone with --from",
        ) from None


def clone_git_dir(path: Path) -> Path | None:
    """Return the git directory of a clone, or None when the path is none."""
    for candidate in (path / ".git", path):
        if (candidate / "objects").is_dir() and (candidate / "HEAD").is_file():
            return candidate
        if candidate.is_file() and candidate.name == ".git":  # a linked worktree
            pointed = (path / candidate.read_text().removeprefix("gitdir: ").strip()).resolve()
            common = pointed / "commondir"
            return (pointed / common.read_text().strip()).resolve() if common.is_file() else pointed
    return None


def clone_tree(path: Path, revision: str) -> tuple[str, Path]:
    """Return the tree id of a revision of a local clone and its object folder; nothing is copied.

    Raises:
        BaseMissing: it is no clone, or has no such revision.
    """
    git_dir = clone_git_dir(path)
    if git_dir is None:
        raise BaseMissing("not a git clone", where=str(path), remedy="name a base of upstream.toml, or CLONE@REVISION")
    found = Repo(git_dir.resolve()).run("rev-parse", "-q", "--verify", f"{revision}^{{tree}}", ok=(0, 1, 128))
    if found.code:
        raise BaseMissing(f"no revision {revision!r}", where=str(path), remedy=f"git -C {path} branch -a")
    return found.text(), git_dir.resolve() / "objects"
