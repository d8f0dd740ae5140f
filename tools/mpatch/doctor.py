"""doctor: which file each megatron.* module would come from, whether it is the patched one, and what is missing.

Imports neither torch nor megatron: `probe.py` looks from within the environment, without importing there either.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import CouldNotCheck
from tools.mpatch.git import run_git
from tools.mpatch.output import Answer
from tools.mpatch.patchfile import blob_id
from tools.mpatch.pins import Pins

GOOD, NOTE, BAD = "good", "note", "bad"
PYC_HEADER_BYTES = 16


@dataclass(frozen=True)
class Fact:
    """One thing looked at: how it stands, what it costs when it is not as it should be, how to get it."""

    name: str
    state: str
    found: str
    cost: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Optional_:
    """A package that training can do without; `pin` is its name in upstream.toml [packages]."""

    module: str
    cost: str
    remedy: str
    pin: str = ""
    needed: bool = False


OPTIONAL = (
    Optional_("torch", "nothing trains", "make venv", "torch", needed=True),
    Optional_("triton", "`import megatron.core` fails: it imports triton without declaring it", "pip install triton",
              needed=True),
    Optional_("apex", "no fused gradient accumulation; the run goes on without it (patch grad-fusion-default)",
              "build it from its repository with --cpp_ext --cuda_ext, version {pin}", "apex"),
    Optional_("transformer_engine", "no FP8, no fused layers; Megatron's local layers are slower",
              'pip install "transformer-engine[pytorch]=={pin}"', "transformer-engine"),
    Optional_("grouped_gemm", "Megatron's own local experts run one by one; --moe-ext-experts torch needs none of it",
              "pip install nv-grouped-gemm=={pin}", "nv-grouped-gemm"),
    Optional_("deep_ep", "no flex backend deepep or deepep_any; dedup and twohop need none of it (docs/dispatch.md)",
              "docs/dispatch.md, DeepEP; sgl-deep-ep in upstream.toml [deepep]"),
)  # fmt: skip


def doctor(checkout: Checkout, python: str = "") -> Answer:
    """Look at the environment that trains. Exit 1 when something would train the wrong code or not at all.

    Raises:
        CouldNotCheck: that Python does not start.
    """
    pins = checkout.pins()
    seen = _probe(python or _default_python(checkout))
    facts = [
        _python_fact(seen, pins),
        _git_fact(checkout),
        *_megatron_facts(checkout, seen),
        _bytecode_fact(checkout.place),
        *(_package_fact(one, seen, pins) for one in OPTIONAL),
    ]
    lines = [f"environment: {seen['executable']}"]
    for fact in facts:
        lines.append(f"{fact.state:<5} {fact.name}: {fact.found}")
        lines += [f"      costs: {fact.cost}"] if fact.cost and fact.state != GOOD else []
        lines += [f"      get it: {fact.remedy}"] if fact.remedy and fact.state != GOOD else []
    data = {"executable": seen["executable"], "facts": [asdict(fact) for fact in facts], "modules": seen["modules"]}
    return Answer(lines, data, 1 if any(fact.state == BAD for fact in facts) else 0)


def _default_python(checkout: Checkout) -> str:
    own = checkout.root / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def _probe(python: str) -> dict[str, Any]:
    script = Path(__file__).with_name("probe.py")
    try:
        done = subprocess.run(
            # -I would drop PYTHONPATH, which is one of the things to look at; the script's own folder is dropped.
            [python, "-c", f"import sys; sys.path[:1] = []; exec(open({str(script)!r}).read())"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120, cwd=os.path.sep,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise CouldNotCheck(
            "the environment's Python does not answer",
            where=python,
            why=str(error),
            remedy="make venv, or name one: --python",
        ) from None


def _python_fact(seen: dict[str, Any], pins: Pins) -> Fact:
    minimum = str(pins.raw.get("python", {}).get("minimum", "3.12"))
    enough = _numbers(seen["python"])[:2] >= _numbers(minimum)[:2]
    return Fact("Python", GOOD if enough else BAD, seen["python"], f"Megatron needs {minimum} or newer",
                "make venv finds one on PATH, under pyenv or through uv")  # fmt: skip


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _git_fact(checkout: Checkout) -> Fact:
    found = run_git("version", cwd=checkout.root).text().removeprefix("git version ")
    enough = _numbers(found)[:2] >= [2, 38]
    return Fact("git", GOOD if enough else NOTE, found, "no rebase and no drift", "install git 2.38 or newer")


def _megatron_facts(checkout: Checkout, seen: dict[str, Any]) -> list[Fact]:
    files = _recorded(checkout)
    if files is None:
        return [Fact("patched tree", BAD, "none", "stock Megatron or none at all is imported", "mpatch apply")]
    root = checkout.place
    facts = [_order_fact(root, seen)]
    tops = Counter((name.split(".")[1], _portion(file)) for name, file in seen["modules"].items())
    foreign = sorted(file for file in seen["modules"].values() if not _inside(file, root))
    if foreign:
        rows = "".join(f"\n        {top}: {count} files from {place}" for (top, place), count in sorted(tops.items()))
        cost = "training from one, core from another: the run imports until it does not"
        found = f"{len(foreign)} modules come from elsewhere, e.g. {foreign[0]}{rows}"
        facts.append(Fact("mixed namespace", BAD, found, cost, "pip uninstall megatron-core in that environment"))
    facts += _content_facts(root, files, seen["modules"])
    installed = seen["megatron_core_installed"]
    if installed and not _inside(installed[1], root):
        cost = "unpatched; comes first on the path where that order differs"
        found = f"{installed[0]} in {installed[1]}"
        facts.append(Fact("installed megatron-core", NOTE, found, cost, "pip uninstall megatron-core"))
    return facts


def _content_facts(root: Path, files: dict[str, str], modules: dict[str, str]) -> list[Fact]:
    inside = {name: file for name, file in modules.items() if _inside(file, root)}
    wrong = [
        f"{name}: {file}"
        for name, file in sorted(inside.items())
        if files.get(os.path.relpath(os.path.realpath(file), os.path.realpath(root))) != _blob(file)
    ]
    if wrong:
        found = f"{len(wrong)} of {len(inside)} differ from the record, e.g. {wrong[0]}"
        remedy = "mpatch status, then mpatch refresh SLUG or mpatch apply --discard"
        return [Fact("patched files", BAD, found, "the run would not be what the pins say", remedy)]
    return [Fact("patched files", GOOD, f"{len(inside)} modules, all as recorded")] if inside else []


def _portion(file: str) -> str:
    """Return the folder that holds the `megatron` of a file.

    >>> _portion("/a/site-packages/megatron/core/x.py")
    '/a/site-packages'
    """
    return file[: file.rindex("/megatron/")] if "/megatron/" in file else file


def _recorded(checkout: Checkout) -> dict[str, str] | None:
    path = checkout.build / "files.json"
    if not path.is_file() or not checkout.place.is_dir():
        return None
    files: dict[str, str] = json.loads(path.read_text())["files"]
    return files


def _order_fact(root: Path, seen: dict[str, Any]) -> Fact:
    name = "first on the path"
    if seen["regular"]:
        return Fact(name, BAD, f"megatron/__init__.py in {seen['portions'][0]}",
                    "a regular package hides the patched namespace", "remove that file or package")  # fmt: skip
    if not seen["portions"]:
        return Fact(
            name, BAD, "no megatron on the path", "nothing trains", "make venv writes the .pth file that puts it there"
        )
    first = seen["portions"][0]
    if _inside(first, root):
        return Fact(name, GOOD, first)
    return Fact(name, BAD, f"{first}, before {root}", "unpatched Megatron is imported",
                "unset PYTHONPATH, pip uninstall megatron-core, or leave that folder")  # fmt: skip


def _inside(file: str, root: Path) -> bool:
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(root))


def _blob(file: str) -> str:
    try:
        return blob_id(Path(file).read_bytes())
    except OSError:
        return ""


def _bytecode_fact(root: Path) -> Fact:
    """Find bytecode that Python would run though its source has gone or says something else."""
    stale = [str(path) for path in sorted(root.rglob("*.pyc")) if _stale(path)]
    if not stale:
        return Fact("bytecode", GOOD, "none stale")
    return Fact("bytecode", BAD, f"{len(stale)} stale, e.g. {stale[0]}", "deleted or older code may run",
                f"find {root} -name __pycache__ -prune -exec rm -r {{}} +")  # fmt: skip


def _stale(path: Path) -> bool:
    if path.parent.name != "__pycache__":
        return not path.with_suffix(".py").exists()  # a bare .pyc without a source is imported as a module
    source = Path(importlib.util.source_from_cache(str(path))) if path.name.count(".") >= 2 else None
    if source is None or not source.exists():
        return False  # bytecode in __pycache__ without a source is never run
    header = path.read_bytes()[:PYC_HEADER_BYTES]
    flags = int.from_bytes(header[4:8], "little")
    # Unchecked hash-based bytecode is run whatever the source says; the usual kind is checked by Python itself.
    return flags == 0b01


def _package_fact(one: Optional_, seen: dict[str, Any], pins: Pins) -> Fact:
    found = seen["packages"].get(one.module, {"file": "", "version": ""})
    pin = pins.packages.get(one.pin, "")
    remedy = one.remedy.format(pin=pin or "any")
    if not found["file"]:
        return Fact(one.module, BAD if one.needed else NOTE, "missing", one.cost, remedy)
    version = found["version"] or "version unknown"
    if pin and found["version"] and found["version"].split("+")[0] != pin:
        return Fact(one.module, NOTE, f"{version}, pinned is {pin}", "untested together", remedy)
    return Fact(one.module, GOOD, version)
