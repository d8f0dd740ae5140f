"""upstream-prep: one patch on upstream's main, checked as upstream checks it, with the draft of the PR text."""

from __future__ import annotations

import fnmatch
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mpatch import sources, style
from tools.mpatch.apply import working
from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import MoveConflict, PatchAbsorbed, StyleWrong, WrongPlace
from tools.mpatch.files import write_bytes
from tools.mpatch.git import Repo, require_version
from tools.mpatch.lint import IDENTITY
from tools.mpatch.message import Message
from tools.mpatch.output import Answer
from tools.mpatch.patchfile import Patch
from tools.mpatch.plan import Item, items_of, places
from tools.mpatch.rebase import MERGE_TREE
from tools.mpatch.series import load_series
from tools.mpatch.stack import build
from tools.mpatch.store import Store
from tools.mpatch.textdiff import changes_between

# Our own trailers say nothing to upstream; these do.
UPSTREAM_TRAILERS = ("Signed-off-by", "Co-authored-by", "Reported-by")
OURS = b"megatron_ext"
OWNERS_FILE = ".github/CODEOWNERS"


@dataclass(frozen=True)
class Prepared:
    """The branch in the clone, and where the draft of the PR text is."""

    branch: str
    commit: str
    draft: str
    owners: tuple[str, ...]
    files: tuple[str, ...]


def upstream_prep(
    checkout: Checkout, slug: str, clone: Path, *, onto: str = "HEAD", ours: str = "megatron_ext"
) -> Answer:
    """Make a branch `mpatch/SLUG` in a clone of upstream: the patch alone, in upstream's style.

    The clone's work tree is not touched. Tests for upstream's tree travel along from
    `patches/upstream-tests/SLUG/`, where that folder exists.

    Raises:
        MoveConflict, WrongPlace, PatchAbsorbed: the patch does not fit there.
        StyleWrong: upstream's checks would refuse it; the branch is made all the same, to mend it there.
    """
    with working(checkout, "upstream-prep"):
        require_version(checkout.root, MERGE_TREE)
        series = load_series(checkout)
        patch = series.patches[series.index(slug)]
        home = sources.fetch(checkout, checkout.pins().base())
        stack = build(checkout.store(), home.tree, series.patches)
        item = items_of(series, stack)[series.index(slug)]
        tree, objects = sources.clone_tree(clone, onto)
        store = checkout.store((objects,))
        merged = _fitted(store, patch, item, tree, f"{clone}@{onto}")
        result = _with_tests(checkout, store, patch.slug, merged)
        branch = f"mpatch/{patch.slug.partition('/')[2]}"
        commit = _publish(store, clone, onto, branch, result, patch.message)
        findings = _findings(store, tree, result, patch.message)
        files = tuple(path for path, _, _ in store.diff(tree, result))
        owners = owners_of(_text(store, tree, OWNERS_FILE), files)
        draft = checkout.build / "upstream" / f"{patch.slug.partition('/')[2]}.md"
        text = pr_text(patch.message, files, owners, len([path for path in files if path.startswith("tests/")]))
        write_bytes(draft, text.encode())
    made = Prepared(branch, commit, checkout.shown(draft), tuple(owners), files)
    if findings:
        raise StyleWrong(
            f"upstream would refuse {patch.slug}: {len(findings)} findings",
            where=f"{clone} {branch}",
            why="\n".join(f"{one.check}: {one.path}: {one.text}" for one in findings),
            remedy=f"mpatch edit {patch.slug}, mend it, mpatch refresh; then run this again",
        )
    lines = [
        f"branch {branch} in {clone}: {commit[:12]} on {onto}",
        f"owner groups: {', '.join(owners) or 'none named'}",
        f"draft of the PR text: {made.draft}",
        "their PRs start as drafts; read every line before you send it",
    ]
    return Answer(lines, made.__dict__ | {"owners": owners, "files": list(files)})


def _fitted(store: Store, patch: Patch, item: Item, tree: str, where: str) -> str:
    """Return upstream's tree with the patch on it."""
    merge = store.merge(item.before, tree, item.after)
    if merge.conflicts:
        remedy = f"mpatch drift {where} says where; make the change there by hand"
        raise MoveConflict(f"{patch.slug} does not fit there", where=", ".join(merge.conflicts), remedy=remedy)
    changes = changes_between(store, tree, merge.tree)
    if not changes:
        remedy = f"mpatch drop {patch.slug} --because TEXT once a release has it"
        raise PatchAbsorbed(f"{patch.slug} changes nothing there: upstream has it", where=where, remedy=remedy)
    if places(changes) != places(patch.changes):
        why = f"was {', '.join(places(patch.changes))}\nnow {', '.join(places(changes))}"
        remedy = "make the change there by hand"
        raise WrongPlace(f"{patch.slug} would land elsewhere", where=where, why=why, remedy=remedy)
    return merge.tree


def _with_tests(checkout: Checkout, store: Store, slug: str, tree: str) -> str:
    folder = checkout.patches / "upstream-tests" / slug
    if not folder.is_dir():
        return tree
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return store.change_tree(tree, {str(path.relative_to(folder)): ("100644", path.read_bytes()) for path in files})


def upstream_message(said: Message) -> str:
    """Return subject, body and the trailers that mean something upstream."""
    trailers = "\n".join(f"{key}: {value}" for key, value in said.trailers if key in UPSTREAM_TRAILERS)
    return "\n\n".join(part for part in (said.subject, said.body, trailers) if part) + "\n"


def _publish(store: Store, clone: Path, onto: str, branch: str, tree: str, said: Message) -> str:
    """Make the commit, and bring it into the clone as a branch without touching its work tree."""
    git_dir = sources.clone_git_dir(clone)
    assert git_dir is not None
    theirs = Repo(git_dir.resolve())
    parent = theirs.run("rev-parse", f"{onto}^{{commit}}").text()
    commit = store.commit(tree, upstream_message(said), parent, author=said.author, email=said.email, date=said.date)
    store.repo.run("update-ref", "refs/mpatch/upstream", commit)
    # Our store lacks upstream's history; theirs has it. So the objects are handed over, not fetched by negotiation.
    wanted = store.repo.run("rev-list", "--objects", "--no-object-names", commit, f"^{parent}").out
    pack = store.repo.run("pack-objects", "--stdout", "-q", stdin=wanted).out
    theirs.run("unpack-objects", "-q", stdin=pack)
    theirs.run("update-ref", f"refs/heads/{branch}", commit)
    return commit


def _findings(store: Store, tree: str, result: str, said: Message) -> list[style.StyleFinding]:
    before: dict[str, bytes | None] = {}
    after: dict[str, bytes | None] = {}
    for path, old, new in store.diff(tree, result):
        before[path] = store.blob(old.blob) if old else None
        after[path] = store.blob(new.blob) if new else None
    names = style.CONFIGURATION
    configuration = {name: text.encode() for name in names if (text := _text(store, tree, name))}
    with tempfile.TemporaryDirectory() as folder:
        found = style.check_files(Path(folder), before, after, configuration)
    for path, data in after.items():
        if data is not None and OURS in data:
            found.append(style.StyleFinding("ours", path, "it names megatron_ext, which upstream does not have"))
    if not IDENTITY.fullmatch(said.trailer("Signed-off-by")):
        found.append(style.StyleFinding("dco", "message", "no Signed-off-by with a name and an address"))
    return found


def _text(store: Store, tree: str, path: str) -> str:
    entry = store.entry(tree, path)
    return store.blob(entry.blob).decode("utf-8", "replace") if entry else ""


def owners_of(codeowners: str, files: Sequence[str]) -> list[str]:
    r"""Return the owner groups of the files, the last matching line of CODEOWNERS for each.

    >>> owners_of("* @a\ncore/ @b @c\ncore/moe/ @d\n", ["core/moe/x.py", "core/y.py"])
    ['@b', '@c', '@d']
    """
    rules = [line.split() for line in codeowners.splitlines() if line.strip() and not line.startswith("#")]
    found: set[str] = set()
    for file in files:
        owners: list[str] = []
        for pattern, *names in rules:
            if _owned(pattern, file):
                owners = names
        found.update(owners)
    return sorted(found)


def _owned(pattern: str, file: str) -> bool:
    anchored = pattern.lstrip("/")
    if anchored.endswith("/"):
        return file.startswith(anchored)
    if anchored == "*" and pattern.startswith("/"):
        return "/" not in file
    return fnmatch.fnmatch(file, anchored) or file.startswith(anchored + "/")


def pr_text(said: Message, files: Sequence[str], owners: Sequence[str], tests: int) -> str:
    """Return the draft of the PR text, from the header of the patch."""
    status = said.trailer("Upstream-Status")
    issue = re.search(r"#\d+", status)
    linked = f"Related to {issue[0]}" if issue else "to be opened before this PR (upstream asks for one with features)"
    body = said.body or said.trailer("Reason")
    tested = f"{tests} test file(s) come with this change." if tests else "none of upstream's fits yet; say why."
    listed = "\n".join(f"- `{path}`" for path in files)
    return f"""# {said.subject}

{body}

**Why**: {said.trailer("Reason")}

**Linked issue**: {linked}

**Tests**: {tested}

**Files**

{listed}

**Owner groups**: {", ".join(owners) or "none named"}

Before "Ready for review" (PRs start as drafts):

- [ ] a person has read every line
- [ ] the Signed-off-by is theirs (DCO)
- [ ] upstream's autoformat script leaves the branch as it is
"""
