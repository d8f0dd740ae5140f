"""The object store: base trees, patched trees, merges. A bare repository under build/, filled from the pins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.mpatch.errors import GitFailed, StateUnreadable
from tools.mpatch.git import Repo, run_git
from tools.mpatch.patchfile import blob_id

TREE_MODE = "040000"


@dataclass(frozen=True)
class Entry:
    """A file of a tree."""

    mode: str
    blob: str


Tree = Mapping[str, Entry]


@dataclass(frozen=True)
class Merge:
    """The answer of a three-way merge: the tree, with markers in the conflicted paths."""

    tree: str
    conflicts: tuple[str, ...]


@dataclass(frozen=True)
class Store:
    """Trees and blobs. `cache` holds what was read or written through this object."""

    repo: Repo
    cache: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)
    commits: dict[tuple[str, ...], str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, path: Path, alternates: tuple[Path, ...] = ()) -> Store:
        """Open the store at `path`, making an empty one where there is none."""
        if not (path / "objects").is_dir():
            if path.exists():
                raise damaged(path, "it has no folder of objects")
            path.parent.mkdir(parents=True, exist_ok=True)
            # Made aside and renamed: a killed init would leave a folder that looks like a store.
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".store-") as made:
                run_git("init", "-q", "--bare", "--template=", os.path.join(made, "store"), cwd=path.parent)
                os.rename(os.path.join(made, "store"), path)
        return cls(Repo(path, alternates=alternates))

    def import_files(self, files: Mapping[str, tuple[str, bytes]]) -> str:
        """Store files (mode and content by path) and return their tree id."""
        stream = [b"commit refs/mpatch/import\ncommitter mpatch <mpatch@localhost> 0 +0000\ndata 0\n\n"]
        for path, (mode, data) in files.items():
            stream.append(b"M %s inline %s\ndata %d\n" % (mode.encode(), quoted(path), len(data)))
            stream += [data, b"\n"]
        self.repo.run("fast-import", "--quiet", "--force", stdin=b"".join(stream))
        return self.repo.run("rev-parse", "refs/mpatch/import^{tree}").text()

    def has_tree(self, tree: str) -> bool:
        """Return whether a whole tree was stored and given a name by `keep`."""
        return (
            self.repo.run("rev-parse", "-q", "--verify", f"refs/mpatch/trees/{tree}^{{tree}}", ok=(0, 1, 128)).code == 0
        )

    def keep(self, tree: str) -> None:
        """Name a tree, which marks it as complete and verified."""
        self.repo.run("update-ref", f"refs/mpatch/trees/{tree}", self.commit(tree, "kept", None))

    def tree(self, treeish: str) -> dict[str, Entry]:
        """Return all files of a tree by path."""
        found = {}
        try:
            listing = self.repo.run("ls-tree", "-r", "-z", treeish).out
        except GitFailed as error:
            self.repo.run("cat-file", "-e", treeish, ok=(0, 1, 128))  # fails too where git itself is at fault
            raise damaged(self.repo.git_dir, error.why) from None
        for line in listing.split(b"\0")[:-1]:
            head, _, path = line.partition(b"\t")
            mode, _, blob = head.decode().split(" ")
            found[path.decode("utf-8", "surrogateescape")] = Entry(mode, blob)
        return found

    def entry(self, treeish: str, path: str) -> Entry | None:
        """Return one file of a tree, None when it is not there."""
        line = self.repo.run("ls-tree", "-z", treeish, "--", path).out.rstrip(b"\0")
        if not line:
            return None
        mode, _, blob = line.partition(b"\t")[0].decode().split(" ")
        return Entry(mode, blob)

    def paths(self, treeish: str) -> list[str]:
        """Return the paths of all files of a tree."""
        out = self.repo.run("ls-tree", "-r", "-z", "--name-only", treeish).out
        return out.decode("utf-8", "surrogateescape").split("\0")[:-1]

    def diff(self, old: str, new: str) -> list[tuple[str, Entry | None, Entry | None]]:
        """Return (path, before, after) of each file in which two trees differ."""
        words = self.repo.run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--full-index", old, new).out.split(
            b"\0"
        )
        found = []
        for head, path in zip(words[0:-1:2], words[1::2], strict=True):
            old_mode, new_mode, old_blob, new_blob, _ = head.decode().lstrip(":").split(" ")
            found.append(
                (
                    path.decode("utf-8", "surrogateescape"),
                    None if old_mode == "000000" else Entry(old_mode, old_blob),
                    None if new_mode == "000000" else Entry(new_mode, new_blob),
                )
            )
        return found

    def blobs(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of several blobs with one process."""
        wanted = dict.fromkeys(ids)
        missing = [one for one in wanted if one not in self.cache]
        if missing:
            out = self.repo.run("cat-file", "--batch", stdin="".join(f"{one}\n" for one in missing).encode()).out
            at = 0
            for one in missing:
                end = out.index(b"\n", at)
                head = out[at:end].split(b" ")
                if len(head) != 3 or head[1] != b"blob":
                    raise damaged(self.repo.git_dir, f"{one} is not there")
                size = int(head[2])
                self.cache[one] = out[end + 1 : end + 1 + size]
                at = end + 2 + size
        return {one: self.cache[one] for one in wanted}

    def blob(self, one: str) -> bytes:
        """Return the content of a blob."""
        return self.blobs([one])[one]

    def diff_blobs(self, before: bytes, after: bytes) -> bytes:
        """Return `git diff -U0` of two contents."""
        ids = [self.write_blob(data) for data in (before, after)]
        return self.repo.run(
            "diff",
            "-U0",
            "--no-color",
            "--no-ext-diff",
            "--no-textconv",
            "--text",
            "--indent-heuristic",
            *ids,
        ).out

    def write_blob(self, data: bytes) -> str:
        """Store a content and return its id."""
        known = blob_id(data)
        if known not in self.cache:
            self.repo.run("hash-object", "-w", "--stdin", "--no-filters", stdin=data)
            self.cache[known] = data
        return known

    def change_tree(self, tree: str, changed: Mapping[str, tuple[str, bytes] | None]) -> str:
        """Return the tree with some files replaced (mode, content), added, or removed (None)."""
        for entry in changed.values():
            if entry is not None:
                self.write_blob(entry[1])
        lines = [
            f"0 {'0' * 40}\t{path}\0" if entry is None else f"{entry[0]} {blob_id(entry[1])}\t{path}\0"
            for path, entry in changed.items()
        ]
        with tempfile.TemporaryDirectory(dir=self.repo.git_dir) as folder:
            env = {"GIT_INDEX_FILE": os.path.join(folder, "index")}
            self.repo.run("read-tree", tree, env=env)
            self.repo.run(
                "update-index",
                "-z",
                "--index-info",
                env=env,
                stdin="".join(lines).encode("utf-8", "surrogateescape"),
            )
            return self.repo.run("write-tree", env=env).text()

    def commit(
        self, tree: str, text: str, parent: str | None, *, author: str = "", email: str = "", date: str = ""
    ) -> str:
        """Store a commit and return its id; the same input gives the same id."""
        key = (tree, text, parent or "", author, email, date)
        if key not in self.commits:
            env = {"GIT_AUTHOR_NAME": author, "GIT_AUTHOR_EMAIL": email, "GIT_AUTHOR_DATE": date} if author else {}
            parents = ["-p", parent] if parent else []
            self.commits[key] = self.repo.run("commit-tree", *parents, tree, stdin=text.encode(), env=env).text()
        return self.commits[key]

    def merge(self, base: str, ours: str, theirs: str) -> Merge:
        """Merge three trees: what changed from base to theirs, put onto ours; renames are followed."""
        root = self.commit(base, "base", None)
        one, other = self.commit(ours, "ours", root), self.commit(theirs, "theirs", root)
        answer = self.repo.run(
            "merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", one, other, ok=(0, 1)
        )
        words = answer.out.decode("utf-8", "surrogateescape").split("\0")
        return Merge(words[0], tuple(dict.fromkeys(word for word in words[1:] if word)))


def damaged(store: Path, why: str) -> StateUnreadable:
    """Return the refusal for a store that is not whole; it can be made again."""
    return StateUnreadable(
        "the object store lacks something",
        where=str(store),
        why=why,
        remedy="it is made again from the pin, and the tree with it: copy your changes out of build/megatron,\n"
        f"then: rm -r {store} build/megatron && mpatch apply",
    )


def quoted(path: str) -> bytes:
    """Quote a path for fast-import: only a leading quote or a line end needs it."""
    raw = path.encode("utf-8", "surrogateescape")
    if raw.startswith(b'"') or b"\n" in raw:
        return b'"' + raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'
    return raw
