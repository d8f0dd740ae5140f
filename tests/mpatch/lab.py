"""A small world for the queue's tests: a fake upstream of ten files with releases, a checkout, real git."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tools.mpatch.cli import main
from tools.mpatch.patchfile import blob_id

REPOSITORY = Path(__file__).resolve().parents[2]

ROUTER = '''"""Routes tokens."""


class Router:
    """Chooses experts."""

    def __init__(self, experts):
        self.experts = experts
        self.bias = 0.0

    def forward(self, tokens):
        scores = self.score(tokens)
        total = sum(scores)
        return total

    def score(self, tokens):
        return [token * self.experts for token in tokens]


class TopKRouter(Router):
    """Chooses k experts."""

    def forward(self, tokens):
        scores = self.score(tokens)
        total = sum(scores)
        return total
'''
FILES = {
    "setup.py": 'raise SystemExit("a build ran while fetching")\n',
    "README.md": "# Fake\n\nA fake upstream.\n",
    "fake/__init__.py": "",
    "fake/core/__init__.py": "from fake.core.router import Router\n",
    "fake/core/router.py": ROUTER,
    "fake/core/loss.py": "def loss(values):\n    # mean\n    return sum(values) / len(values)\n",
    "fake/core/data.py": "\n".join(f"def field_{n}():\n    return {n}\n\n" for n in range(12)),
    "fake/train.py": "def train(steps):\n    done = 0\n    for _ in range(steps):\n        done += 1\n    return done"
    "\n",
    "fake/tool.sh": "#!/bin/sh\necho fake\n",
    "fake/version.py": '__version__ = "1.0"\n',
}
TRAILERS = """Upstream-Status: {status}
Reason: a test
Removal-Plan: when a release has it
Scope: sdist
Depends-On: {needs}
Proof: {proof}
Signed-off-by: A Tester <tester@lab.example>
"""


def release(name: str) -> dict[str, str]:
    """Return the files of a release: 1.0, `clean` (other files changed), `moved`, `absorbed`."""
    files = dict(FILES)
    if name == "1.0":
        return files
    files["fake/version.py"] = f'__version__ = "{name}"\n'
    files["fake/train.py"] = "# Trains.\n" + files["fake/train.py"]
    if name == "moved":
        header = "\n".join(f"OPTION_{n} = {n}" for n in range(30))
        files["fake/core/router.py"] = ROUTER.replace("\n\nclass Router:", f"\n\n{header}\n\n\nclass Router:", 1)
    if name == "absorbed":
        files["fake/core/loss.py"] = files["fake/core/loss.py"].replace("len(values)", "max(len(values), 1)")
    return files


def tree_of(files: dict[str, str]) -> str:
    """Return git's tree id of files, computed by git itself."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), files)
        plain_git(folder, "init", "-q")
        plain_git(folder, "add", "-Af", ".")
        return plain_git(folder, "write-tree").strip()


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        if name.endswith(".sh"):
            path.chmod(0o755)


def plain_git(folder: Path | str, *words: str, stdin: str = "") -> str:
    """Run git as a user without configuration would."""
    env = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "HOME": "/nonexistent",
        "GIT_AUTHOR_NAME": "u",
        "GIT_AUTHOR_EMAIL": "u@u",
        "GIT_COMMITTER_NAME": "u",
        "GIT_COMMITTER_EMAIL": "u@u",
    }
    return subprocess.run(
        ["git", *words], cwd=folder, env=env, input=stdin, text=True, check=True, capture_output=True
    ).stdout


def sdist(files: dict[str, str], version: str) -> bytes:
    """Return a source distribution, made by the tar library as indexes serve it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"fake-{version}/{name}")
            member.size = len(text.encode())
            member.mode = 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(out.getvalue(), mtime=0)


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def data(self):
        return json.loads(self.out)


@dataclass
class Lab:
    """A checkout in a folder of its own, with releases as sdists in `shelf`."""

    root: Path
    shelf: Path

    @property
    def tree(self) -> Path:
        return self.root / "build" / "megatron"

    def add_base(self, name: str, files: dict[str, str], *, default: bool = False) -> None:
        data = sdist(files, name)
        filename = f"fake-{name}.tar.gz"
        (self.shelf / filename).write_bytes(data)
        pins = self.root / "upstream.toml"
        text = pins.read_text() if pins.exists() else f'schema = 1\ndefault_base = "{name}"\n'
        pins.write_text(
            text + f'\n[bases."{name}"]\nkind = "sdist"\npackage = "fake"\nversion = "{name}"\n'
            f'filename = "{filename}"\nsize_bytes = {len(data)}\n'
            f'sha256 = "{hashlib.sha256(data).hexdigest()}"\ntree = "{tree_of(files)}"\n'
        )

    def run(self, *words: str) -> Said:
        """Run mpatch in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([words[0], "--root", str(self.root), *words[1:]])
        return Said(code, out.getvalue(), err.getvalue())

    def good(self, *words: str) -> Said:
        said = self.run(*words)
        assert said.code == 0, said
        return said

    def process(self, *words: str, **more) -> subprocess.CompletedProcess[str]:
        """Run mpatch as a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "tools.mpatch", words[0], "--root", str(self.root), *words[1:]],
            cwd=REPOSITORY,
            text=True,
            capture_output=True,
            check=False,
            **more,
        )

    def apply(self, *words: str) -> Said:
        return self.good("apply", "--offline", str(self.shelf), *words)

    def message(
        self,
        subject: str,
        *,
        needs: str = "none",
        status: str = "Pending",
        proof: str = "tests/test_x.py::test_x",
    ) -> Path:
        path = self.root.parent / "message.txt"
        path.write_text(
            f"{subject}\n\nBecause it is a test.\n\n" + TRAILERS.format(needs=needs, status=status, proof=proof)
        )
        return path

    def replace(self, path: str, old: str, new: str) -> None:
        """Change a file of the patched tree."""
        file = self.tree / path
        text = file.read_text()
        assert old in text, (path, old)
        file.write_text(text.replace(old, new, 1))

    def add_patch(self, slug: str, path: str, old: str, new: str, **more: str) -> None:
        """Make a patch the way a maintainer does."""
        self.good("new", slug, "--message", str(self.message(f"Change {slug}", **more)))
        self.replace(path, old, new)
        self.good("refresh")

    def patch(self, slug: str) -> bytes:
        return (self.root / "patches" / f"{slug}.patch").read_bytes()

    def snapshot(self, under: str = ".") -> dict[str, tuple[int, str]]:
        """Return time and content of every file of the checkout, to see that nothing was written."""
        return {
            str(path.relative_to(self.root)): (path.stat().st_mtime_ns, blob_id(path.read_bytes()))
            for path in (self.root / under).rglob("*")
            if path.is_file() and path.name != "lock"
        }


def make_lab(folder: Path) -> Lab:
    """Return a lab with release 1.0 pinned and an empty series."""
    lab = Lab(folder / "checkout", folder / "shelf")
    lab.shelf.mkdir(parents=True)
    (lab.root / "patches").mkdir(parents=True)
    (lab.root / "patches" / "series").write_text("# order\n")
    lab.add_base("1.0", release("1.0"))
    return lab


def with_three(lab: Lab) -> Lab:
    """Give the lab a series of three patches, one of them on top of another."""
    lab.apply()
    lab.add_patch("core/guard", "fake/core/loss.py", "len(values)", "max(len(values), 1)")
    lab.add_patch(
        "core/top-k",
        "fake/core/router.py",
        '''    """Chooses k experts."""

    def forward(self, tokens):
        scores''',
        '''    """Chooses k experts."""

    def forward(self, tokens):
        tokens = list(tokens)
        scores''',
    )
    lab.add_patch(
        "core/top-k-more",
        "fake/core/router.py",
        "tokens = list(tokens)",
        "tokens = sorted(tokens)",
        needs="core/top-k",
    )
    return lab
