"""The stage: a folder that holds what setuptools shall pack, laid out as it shall be installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.mpatch import apply
from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import CouldNotCheck
from tools.mpatch.git import run_git
from tools.mpatch.patchfile import blob_id
from tools.mpatch.pins import Base, SdistBase
from tools.package.commands import SBOM_FOLDER

# Beside the packages: what setuptools reads, and what the sdist's users are owed.
TOP = ("LICENSE", "NOTICE", "README.md", "pyproject.toml", "setup.py", "upstream.toml")
LEFTOVERS = {"build", "dist", ".venv", ".git", "runs", "PKG-INFO", "setup.cfg"}
# Says in the folder itself that its files were changed. Without a file right in it, pip would leave the folder behind.
PATCHED = "megatron/PATCHED.txt"
HELPER_SOURCE = "megatron/core/datasets/helpers.cpp"
# The licence that upstream's package names. Its archive holds no text, so a build requirement that is under the same
# licence lends its copy; pybind11's headers are compiled into the dataset helper.
LICENCE_TEXTS = {
    "LICENSE.megatron-core": ("packaging", "LICENSE.APACHE"),
    "LICENSE.pybind11": ("pybind11", "LICENSE"),
}


@contextlib.contextmanager
def for_wheel(root: Path, epoch: int) -> Iterator[Path]:
    """Give a stage with megatron_ext and, beside it, the verified patched Megatron with its helper."""
    from tools.package import sbom  # a development install does without the library

    with _stage(root, ("megatron_ext/",)) as folder, _patched(root) as patched:
        _lay_megatron(patched, folder)
        records = {name: json.loads((patched.build / f"{name}.json").read_text()) for name in ("pins", "files")}
        _write(folder / "megatron_ext" / "_pins.json", records["pins"])
        _licences(patched, folder, records["files"]["touched"])
        records["files"]["files"] = _ids(folder, records["files"]["files"])
        _write(folder / "megatron_ext" / "_files.json", records["files"])
        for path in listed(root):
            if path.startswith("examples/"):
                _copy(root / path, folder / "megatron_ext" / "_examples" / path.removeprefix("examples/"))
        target = folder / SBOM_FOLDER / "megatron-moe.cdx.json"
        target.parent.mkdir()
        target.write_text(sbom.render(patched, records["pins"], root=root, epoch=epoch))
        yield folder


@contextlib.contextmanager
def for_sdist(root: Path) -> Iterator[Path]:
    """Give a stage with every file of the checkout, and a manifest that names each."""
    with _stage(root, ("",)) as folder:
        names = [path for path in listed(root) if (root / path).is_file()]
        (folder / "MANIFEST.in").write_text("".join(f"include {path}\n" for path in names))
        yield folder


@contextlib.contextmanager
def for_metadata(root: Path) -> Iterator[Path]:
    """Give a stage from which the metadata alone can be made; the licence files' names are part of it."""
    with _stage(root, ()) as folder:
        for name in (*LICENCE_TEXTS, "NOTICE.megatron-core"):
            (folder / name).touch()
        (folder / "megatron").mkdir()
        yield folder


def listed(root: Path) -> list[str]:
    """Return the files of a checkout as git lists them, of an unpacked sdist as they lie there; sorted."""
    if (root / ".git").exists():
        out = run_git("ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=root).out
        return sorted({path for path in out.decode().split("\0") if path and (root / path).is_file()})
    found = []
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        if parts[0] in LEFTOVERS or "__pycache__" in parts or any(part.endswith(".egg-info") for part in parts):
            continue
        if path.is_file():
            found.append("/".join(parts))
    return sorted(found)


@contextlib.contextmanager
def _stage(root: Path, prefixes: tuple[str, ...]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moe-stage-") as name:
        folder = Path(name)
        for path in listed(root):
            if path in TOP or path.startswith(prefixes):
                _copy(root / path, folder / path)
        yield folder


@contextlib.contextmanager
def _patched(root: Path) -> Iterator[Checkout]:
    """Give a scratch checkout in which the series was applied and verified; the real one may have an edit open."""
    os.environ.setdefault("MPATCH_CACHE", str(root / "build" / "cache"))
    with tempfile.TemporaryDirectory(prefix="moe-tree-") as name:
        scratch = Checkout(Path(name))
        shutil.copy(root / "upstream.toml", scratch.pins_file)
        shutil.copytree(root / "patches", scratch.patches)
        apply.apply(scratch)
        apply.verify(scratch)
        yield scratch


def _lay_megatron(patched: Checkout, folder: Path) -> None:
    from tools.setup import build_helpers

    for path in sorted((patched.place / "megatron").rglob("*")):
        if path.is_file():
            _copy(path, folder / path.relative_to(patched.place))
    helper = build_helpers.cached_helper(folder / HELPER_SOURCE)
    if helper is None:
        raise CouldNotCheck(
            "the dataset helper was not compiled",
            where=HELPER_SOURCE,
            remedy="install what the lines above name; then build again",
        )
    _copy(helper, (folder / HELPER_SOURCE).with_name(helper.name))


def _ids(folder: Path, known: dict[str, str]) -> dict[str, str]:
    """Return the blob ids of all that lies below megatron/: the tree's own, then the helper's and the notice's."""
    found = {path: blob for path, blob in known.items() if path.startswith("megatron/")}
    for added in (*folder.glob("megatron/**/*.so"), folder / PATCHED):
        found[str(added.relative_to(folder))] = blob_id(added.read_bytes())
    return dict(sorted(found.items()))


def _licences(patched: Checkout, folder: Path, touched: list[str]) -> None:
    for target, (package, name) in LICENCE_TEXTS.items():
        distribution = importlib.metadata.distribution(package)
        files = [file for file in distribution.files or [] if file.name == name and ".dist-info" in str(file)]
        (folder / target).write_bytes(Path(str(distribution.locate_file(files[0]))).read_bytes())
    notice = _upstream_notice(patched, touched)
    for target in ("NOTICE.megatron-core", PATCHED):
        (folder / target).write_text(notice)


def _upstream_notice(patched: Checkout, touched: list[str]) -> str:
    base = patched.pins().base()
    told = patched.place / "PKG-INFO"
    said = [line for line in told.read_text().splitlines() if "License" in line] if told.is_file() else []
    return (
        f"This wheel holds {base.describe()}, changed by the patches that `megatron-moe --version` lists.\n"
        f"Source: {_source(base)}.\n\n"
        "Its metadata says of its licence:\n\n" + "".join(f"    {line}\n" for line in said) + "\n"
        "The archive holds no licence text; LICENSE.megatron-core is the text of the licence that the metadata names.\n"
        "Copyright notices stand in the files.\n\n"
        "Changed files:\n\n" + "".join(f"    {path}\n" for path in touched)
    )


def _source(base: Base) -> str:
    if isinstance(base, SdistBase):
        return f"{base.filename}, sha256 {base.sha256}"
    return f"{base.url or base.repository}, commit {base.commit}"


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)


def _write(target: Path, value: object) -> None:
    target.write_text(json.dumps(value, indent=1) + "\n")
