"""bundle: everything that a GPU node without a network needs, in folders of a given size, with one install script."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import UsageError
from tools.mpatch.files import write_bytes, write_json
from tools.mpatch.output import Answer
from tools.package import resolve
from tools.package.target import Target, size_bytes

TE = "transformer-engine"
# The bindings are an sdist on the index; building them needs CUDA's headers and torch, so a wheel must be given.
TE_BINDINGS = "transformer-engine-torch"
# What belongs to a build of torch and moves with it.
TORCH_FAMILY = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
# Kept free in each folder for the files beside it.
RESERVED_BYTES = 1 << 19
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """What to gather.

    Args:
        target: The machine it is for.
        torch: torch's version; with a local part ("2.11.0+cu128") another index must offer it.
        te: Transformer Engine's version; empty leaves it out.
        more: Further requirements.
        without: Names that the machine has already.
        wheel: Our wheel; None builds it.
        wheels: A folder with wheels that no index has.
    """

    target: Target
    torch: str
    te: str = ""
    more: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    wheel: Path | None = None
    wheels: Path | None = None


def bundle(checkout: Checkout, out: Path, wanted: Wanted, split: str = "") -> Answer:
    """Gather the wheels, check them, and lay the bundle out; `out` appears only when it is whole.

    Raises:
        UsageError: `out` is there already, or an option makes no sense.
        CannotGather: a package cannot be had for that machine.
        DownloadMismatch: what came is not what is locked.
    """
    limit = size_bytes(split) if split else 0
    if out.exists():
        raise UsageError("the folder is there already", where=str(out), remedy="name a new one, or remove it")
    lock = checkout.root / "tools" / "requirements" / "train.txt"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        folder, made = Path(name) / "wheels", Path(name) / "bundle"
        folder.mkdir()
        own = wanted.wheel or _own_wheel(checkout, wanted.target, Path(name) / "own")
        _check_own(own, wanted.target)
        pins = _resolve(checkout, wanted, lock)
        resolve.download(pins, wanted.target, folder, extra=wanted.wheels)
        checked = resolve.check_locked(sorted(folder.glob("*.whl")), lock)
        shutil.copyfile(own, folder / own.name)
        record = lay_out(sorted(folder.glob("*.whl")), made, wanted.target, limit, borrow=bool(without(wanted)))
        record |= {"torch": wanted.torch, "without": without(wanted), "locked": checked}
        write_json(made / "bundle.json", record)
        _write_sums(made)
        made.rename(out)
    files: list[dict[str, Any]] = record["files"]
    total = sum(int(file["size_bytes"]) for file in files)
    return Answer(
        [
            f"{out}: {len(files)} wheels, {total / 1e6:.1f} MB in {record['folders']} folders; "
            f"{checked} are the locked files",
            f"on the machine: bash {out.name}/install.sh ENVIRONMENT",
        ],
        {"folder": str(out), **record},
    )


def without(wanted: Wanted) -> list[str]:
    """Return the names that the machine has already, in the index's spelling."""
    return sorted({str(canonicalize_name(name)) for name in wanted.without})


def lay_out(wheels: Sequence[Path], made: Path, target: Target, limit: int, *, borrow: bool) -> dict[str, Any]:
    """Write install.sh, the requirements and the wheels, cut and spread over numbered folders under `limit` bytes each.

    Args:
        borrow: Let the environment see what the machine's own Python has installed.

    Returns:
        What was written: each wheel with sha256, size and pieces.
    """
    made.mkdir()
    files, requirements = [], []
    room = (limit - RESERVED_BYTES) if limit else 0
    folders = Folders(made, room)
    # Large ones first: what is left of their last folder is filled by small ones.
    for wheel in sorted(wheels, key=lambda path: (-path.stat().st_size, path.name)):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        digest = resolve.sha256(wheel)
        pieces = [str(path.relative_to(made)) for path in folders.put(wheel)]
        files.append({"name": wheel.name, "sha256": digest, "size_bytes": wheel.stat().st_size, "pieces": pieces})
        requirements.append(f"{name}=={version} --hash=sha256:{digest}\n")
    write_bytes(made / "requirements.txt", "".join(sorted(requirements)).encode())
    options = f"{target.python}{' --system-site-packages' if borrow else ''}\n"
    write_bytes(made / "environment", options.encode())
    write_bytes(made / "install.sh", Path(__file__).with_name("bundle.sh").read_bytes())
    return {
        "schema": 1,
        "python": target.python,
        "platform": target.uv_platform,
        "cuda": target.cuda,
        "folders": folders.count,
        "files": sorted(files, key=lambda file: str(file["name"])),
    }


class Folders:
    """Numbered folders, filled one after the other; a piece goes into the first that has room for it."""

    def __init__(self, made: Path, room: int) -> None:
        self.made = made
        self.room = room
        self.used: list[int] = []

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.used)

    def put(self, wheel: Path) -> list[Path]:
        """Copy a wheel into them, in pieces where it is larger than a folder; return the files written, in order."""
        size = wheel.stat().st_size
        if not self.room or size <= self.room:
            target = self._folder(size) / wheel.name
            shutil.copyfile(wheel, target)
            return [target]
        pieces = []
        with wheel.open("rb") as stream:
            for number, at in enumerate(range(0, size, self.room)):
                length = min(self.room, size - at)
                target = self._folder(length) / f"{wheel.name}.part-{number:04d}"
                with target.open("wb") as out:
                    for chunk in _chunks(stream, length):
                        out.write(chunk)
                pieces.append(target)
        return pieces

    def _folder(self, size: int) -> Path:
        at = next((number for number, used in enumerate(self.used) if not self.room or used + size <= self.room), None)
        if at is None:
            at = len(self.used)
            self.used.append(0)
        self.used[at] += size
        folder = self.made / f"{at + 1:03d}"
        folder.mkdir(exist_ok=True)
        return folder


def _chunks(stream: Any, length: int) -> Iterator[bytes]:
    while length:
        chunk = stream.read(min(CHUNK_BYTES, length))
        length -= len(chunk)
        yield chunk


def _resolve(checkout: Checkout, wanted: Wanted, lock: Path) -> dict[str, str]:
    pinned = checkout.pins().packages
    project = tomllib.loads((checkout.root / "pyproject.toml").read_text())["project"]
    versions = {**pinned, "torch": wanted.torch}
    asked = [f"{name}=={versions[name]}" if name in versions else name for name in project["dependencies"]]
    asked += ["pip", *wanted.more]
    if wanted.te:
        asked.append(f"{TE}[core_cu{wanted.target.cuda},pytorch]=={wanted.te}")
    there = without(wanted)
    asked = [line for line in asked if canonicalize_name(Requirement(line).name) not in there]
    loose = []
    if wanted.torch != pinned.get("torch"):
        loose = [name for name in resolve.locked(lock)[0] if TORCH_FAMILY.fullmatch(name)]
    pins = resolve.resolve(
        asked, wanted.target, lock=lock, loose=loose, excluded=there, extra=wanted.wheels,
        only_wheels=[TE_BINDINGS],
    )  # fmt: skip
    check_cuda(pins, wanted.target)
    return pins


def check_cuda(pins: dict[str, str], target: Target) -> None:
    """Refuse a set whose libraries are for another CUDA than the machine's. Some packages bring theirs for several.

    Raises:
        CannotGather: it names the libraries.
    """
    versions = {name: match[1] for name in pins if (match := re.search(r"-cu(\d+)$", name))}
    right = {name.removesuffix(f"-cu{major}") for name, major in versions.items() if major == target.cuda}
    wrong = sorted(name for name, major in versions.items() if name.removesuffix(f"-cu{major}") not in right)
    if wrong:
        raise resolve.CannotGather(
            f"these packages are not for CUDA {target.cuda}",
            where=", ".join(wrong),
            why="the index's build of torch, or Transformer Engine, brings them",
            remedy=f"--cuda {versions[wrong[0]]}, or --torch and an index with a build for CUDA {target.cuda}",
        )


def _own_wheel(checkout: Checkout, target: Target, folder: Path) -> Path:
    """Build our wheel with the target's Python, which must be installed here."""
    words = ["build", "--quiet", "--wheel", "--python", target.python, "--out-dir", str(folder), str(checkout.root)]
    found = subprocess.run(
        ["bash", str(checkout.root / "tools" / "setup" / "find_python.sh"), target.python],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if found.returncode == 0:
        words[words.index(target.python)] = found.stdout.strip()
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run([str(uv) if uv.exists() else "uv", *words], capture_output=True, text=True, check=False,
                          timeout=resolve.LONG_TIMEOUT_S)  # fmt: skip
    made = sorted(folder.glob("*.whl"))
    if done.returncode or not made:
        raise resolve.CannotGather(
            f"our wheel was not built for Python {target.python}",
            where=str(checkout.root),
            why=done.stderr.strip()[-1500:],
            remedy=f"install Python {target.python}, or build it elsewhere and name it: --wheel FILE",
        )
    return made[0]


def _check_own(wheel: Path, target: Target) -> None:
    if not wheel.is_file() or not target.fits(wheel):
        raise UsageError(
            f"this is no wheel for Python {target.python} on {target.uv_platform}",
            where=str(wheel),
            remedy="docs/package.md says how to build it; it must be built with that Python",
        )


def _write_sums(made: Path) -> None:
    files = sorted(path for path in made.rglob("*") if path.is_file())
    lines = [f"{resolve.sha256(path)}  {path.relative_to(made)}\n" for path in files]
    write_bytes(made / "SHA256SUMS", "".join(lines).encode())
