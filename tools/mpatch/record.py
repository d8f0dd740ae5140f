"""fetch --record: look at a new base once, and write its pin (size, sha256, tree id) into upstream.toml."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from tools.mpatch import sources
from tools.mpatch.apply import working
from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import BaseMissing, UsageError
from tools.mpatch.files import temporary, write_bytes
from tools.mpatch.git import Repo
from tools.mpatch.output import Answer
from tools.mpatch.pins import load_pins

NAME = re.compile(r"[A-Za-z0-9_-]+")


def record(checkout: Checkout, name: str, source: str) -> Answer:
    """Append [bases.NAME] to upstream.toml. The default base stays; `mpatch rebase --onto NAME` moves it.

    Args:
        name: The new base's name.
        source: PACKAGE==VERSION on the configured index, an sdist FILE.tar.gz, or CLONE[@REVISION].

    Raises:
        UsageError: the name is taken or has other characters than letters, digits, hyphen, underscore.
        BaseMissing: there is no such source.
    """
    if not NAME.fullmatch(name) or name in checkout.pins().bases:
        raise UsageError(f"{name!r} is taken, or no plain name", where="upstream.toml", remedy="choose another name")
    with working(checkout, "fetch --record"):
        path, _, revision = source.partition("@")
        if Path(path).is_dir():
            table = _of_clone(Path(path), revision or "HEAD")
        else:
            table = _of_sdist(checkout, source)
        text = checkout.pins_file.read_text(encoding="utf-8").rstrip("\n")
        rows = "\n".join(
            f"{key} = {value if isinstance(value, int) else _quoted(value)}" for key, value in table.items()
        )
        write_bytes(checkout.pins_file, f"{text}\n\n[bases.{name}]\n{rows}\n".encode())
    load_pins(checkout.pins_file)
    return Answer([f"recorded [bases.{name}]", *rows.split("\n")], {"base": name, **table})


def _quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _of_clone(path: Path, revision: str) -> dict[str, str | int]:
    tree, _ = sources.clone_tree(path, revision)
    git_dir = sources.clone_git_dir(path)
    assert git_dir is not None
    commit = Repo(git_dir.resolve()).run("rev-parse", f"{revision}^{{commit}}").text()
    return {"kind": "git", "repository": path.resolve().name, "commit": commit, "tree": tree, "scope": "git"}


def _of_sdist(checkout: Checkout, source: str) -> dict[str, str | int]:
    from packaging.utils import InvalidSdistFilename, parse_sdist_filename  # used here only, and slow to load

    from tools.mpatch import index

    file = Path(source)
    if not file.is_file():
        package, _, version = source.partition("==")
        if not version:
            raise BaseMissing(f"no file, clone or release {source!r}",
                              remedy="PACKAGE==VERSION, FILE.tar.gz or CLONE[@REVISION]")  # fmt: skip
        file = index.download_release(package, version, checkout.cache)
    try:
        package, parsed = parse_sdist_filename(file.name)
    except InvalidSdistFilename as error:
        raise BaseMissing("not the name of an sdist", where=str(file), why=str(error),
                          remedy="name-version.tar.gz, as the index has it") from None  # fmt: skip
    data = file.read_bytes()
    kept = checkout.cache / file.name
    if kept != file:
        with temporary(kept) as partial:
            shutil.copyfile(file, partial)
    store = checkout.store()
    tree = store.import_files(sources.sdist_files(file))
    store.keep(tree)
    return {
        "kind": "sdist", "package": str(package), "version": str(parsed), "filename": file.name,
        "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tree": tree, "scope": "sdist",
    }  # fmt: skip
