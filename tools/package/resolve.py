"""From names to files: exact versions for a target (uv), then the wheels themselves (pip). No host is named."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

from tools.mpatch.errors import CouldNotCheck, DownloadMismatch
from tools.package.target import Target

PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
LONG_TIMEOUT_S = 3600  # torch and its libraries are gigabytes


class CannotGather(CouldNotCheck):
    """A package of the bundle cannot be resolved, downloaded or built here."""


def resolve(
    requirements: Sequence[str],
    target: Target,
    *,
    lock: Path | None = None,
    loose: Sequence[str] = (),
    excluded: Sequence[str] = (),
    extra: Path | None = None,
    only_wheels: Sequence[str] = (),
) -> dict[str, str]:
    """Return name -> version of everything that the requirements need on the target.

    Args:
        lock: A hashed requirements file; what stands there keeps its tested version.
        loose: Names whose locked version does not count, because another torch was asked for.
        excluded: Names that the machine has already; what only they need is left out too.
        extra: A folder of wheels that stands beside the index.
        only_wheels: Names that must not be built here.

    Raises:
        CannotGather: no such set of versions exists.
    """
    words = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", target.python,
             "--python-platform", target.uv_platform, "-"]  # fmt: skip
    words += [word for name in only_wheels for word in ("--only-binary", name)]
    words += ["--find-links", str(extra)] if extra else []
    kept = {name: version for name, version in locked(lock)[0].items() if name not in loose} if lock else {}
    with tempfile.TemporaryDirectory(prefix="mpatch-") as folder:
        constraints, excludes = Path(folder) / "constraints.txt", Path(folder) / "excludes.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()))
        excludes.write_text("".join(f"{name}\n" for name in excluded))
        words += ["--constraints", str(constraints), "--excludes", str(excludes)]
        done = _run([_uv(), *words], stdin="\n".join(requirements) + "\n")
    if done.returncode:
        raise CannotGather(
            f"no set of packages fits Python {target.python} on {target.uv_platform}",
            where=", ".join(requirements),
            why=done.stderr.strip()[-1500:],
            remedy="name other versions, a folder with the missing wheels (--wheels DIR), or another index",
        )
    return {canonicalize_name(name): version for name, version in PIN.findall(done.stdout)}


def locked(lock: Path) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Return the versions and the sha256 of all files of each package that a hashed requirements file names."""
    versions: dict[str, str] = {}
    hashes: dict[str, set[str]] = {}
    # A package's hashes stand on the lines behind its own, up to the next package.
    for part in re.split(r"^(?=[A-Za-z0-9])", lock.read_text(), flags=re.MULTILINE):
        match = PIN.match(part)
        if match:
            name = canonicalize_name(match[1])
            versions[name] = match[2]
            hashes[name] = set(HASH.findall(part))
    return versions, hashes


def download(pins: Mapping[str, str], target: Target, folder: Path, *, extra: Path | None = None) -> None:
    """Bring a wheel of each pin into the folder; a pure package that has only an sdist is built here.

    Raises:
        CannotGather: the index has no wheel for the target and none can be built.
    """
    words = ["--python-version", target.python, "--implementation", "cp", "--only-binary", ":all:"]
    words += ["--dest", str(folder)]
    words += [word for platform in target.platforms for word in ("--platform", platform)]
    if extra:
        # pip takes no plain linux wheel for another machine's platforms, so these are copied, not downloaded.
        words += ["--find-links", str(extra)]
    left = {name: version for name, version in pins.items() if not _copied(name, version, target, extra, folder)}
    everything = [f"{name}=={version}" for name, version in left.items()]
    if not everything or not _pip("download", "--no-deps", *words, *everything).returncode:
        return
    for one in everything:
        tried = _pip("download", "--no-deps", *words, one)
        if tried.returncode and not _built(one, target, folder):
            raise CannotGather(
                f"there is no wheel of {one} for Python {target.python} on {target.uv_platform}",
                why=tried.stderr.strip()[-600:],
                remedy="build one on such a machine and name its folder: mpatch bundle --wheels DIR",
            )


def check_locked(wheels: Sequence[Path], lock: Path) -> int:
    """Compare what came with the lock's hashes where it has that version; return how many were compared.

    Raises:
        DownloadMismatch: a file is none of those that were locked.
    """
    versions, hashes = locked(lock)
    checked = 0
    for wheel in wheels:
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if versions.get(name) != str(version):
            continue
        digest = sha256(wheel)
        if digest not in hashes[name]:
            raise DownloadMismatch(
                f"{wheel.name} is not a locked file",
                where=str(lock),
                why=f"sha256 {digest} is none of the {len(hashes[name])} that are locked for {name} {version}",
                remedy="look at what the index serves; make lock rewrites the file if that is right",
            )
        checked += 1
    return checked


def sha256(path: Path) -> str:
    """Return the digest of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _copied(name: str, version: str, target: Target, extra: Path | None, folder: Path) -> bool:
    for wheel in sorted(extra.glob("*.whl")) if extra else []:
        found = parse_wheel_filename(wheel.name)
        if found[0] == name and str(found[1]) == version and target.fits(wheel):
            shutil.copyfile(wheel, folder / wheel.name)
            return True
    return False


def _built(requirement: str, target: Target, folder: Path) -> bool:
    before = set(folder.glob("*.whl"))
    done = _pip("wheel", "--no-deps", "--wheel-dir", str(folder), requirement)
    made = set(folder.glob("*.whl")) - before
    good = done.returncode == 0 and all(wheel.name.endswith("-none-any.whl") and target.fits(wheel) for wheel in made)
    for wheel in () if good else made:
        wheel.unlink()
    return good


def _pip(*words: str) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "pip", words[0], "--quiet", "--disable-pip-version-check", *words[1:]])


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if not found:
        raise CannotGather("uv is not installed", remedy="make venv, then use .venv/bin/mpatch")
    return found


def _run(words: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, input=stdin, capture_output=True, text=True, check=False, timeout=LONG_TIMEOUT_S)
