from __future__ import annotations

import pytest
from lab import FILES, plain_git, release, write_files


def fates(lab, *bases, code):
    said = lab.run("drift", *bases, "--offline", str(lab.shelf), "--json")
    assert said.code == code, said
    return [{fate["slug"]: fate["state"] for fate in base["fates"]} for base in said.data["bases"]]


def test_clean_offset_and_absorbed(three):
    for name in ("clean", "moved", "absorbed"):
        three.add_base(name, release(name))
    before = three.snapshot("patches"), three.snapshot("build/megatron")
    clean, moved, absorbed = fates(three, "clean", "moved", "absorbed", code=1)
    assert set(clean.values()) == {"clean"}
    assert moved == {"core/guard": "clean", "core/top-k": "offset", "core/top-k-more": "offset"}
    assert absorbed == {"core/guard": "absorbed", "core/top-k": "clean", "core/top-k-more": "clean"}
    assert (three.snapshot("patches"), three.snapshot("build/megatron")) == before


def variant(lab, name, **changes):
    files = release("clean")
    for path, text in changes.items():
        path = path.replace("__", "/") + ".py"
        del files[path]
        if isinstance(text, tuple):
            files[text[0]] = text[1]
        elif text is not None:
            files[path] = text
    lab.add_base(name, files)


def test_every_kind_of_conflict_in_one_run(three):
    router = FILES["fake/core/router.py"]
    variant(three, "gone", fake__core__router=None)
    variant(three, "moved-file", fake__core__router=("fake/moe/router.py", router))
    variant(
        three,
        "merged",
        fake__core__loss="def loss(values):\n    # mean!\n    # more\n    return sum(values) / len(values)\n",
    )
    variant(three, "wrong", fake__core__router=router.replace("class TopKRouter", "class BestRouter"))
    variant(three, "conflict", fake__core__loss="def loss(values):\n    # mean\n    return sum(values) / n\n")
    said = three.run(
        "drift", "gone", "moved-file", "merged", "wrong", "conflict", "--offline", str(three.shelf), "--json"
    )
    assert said.code == 1
    by_base = {base["base"]: {fate["slug"]: fate for fate in base["fates"]} for base in said.data["bases"]}
    assert by_base["gone"]["core/top-k"]["state"] == "file-gone"
    assert "needs core/top-k, which does not fit" in by_base["gone"]["core/top-k-more"]["detail"]
    assert by_base["moved-file"]["core/top-k"]["state"] == "file-moved"
    assert "fake/moe/router.py" in by_base["moved-file"]["core/top-k"]["detail"]
    assert by_base["merged"]["core/guard"]["state"] in ("3way-clean", "conflict")
    assert by_base["wrong"]["core/top-k"]["state"] == "wrong-place"
    assert by_base["conflict"]["core/guard"]["state"] == "conflict"
    assert by_base["conflict"]["core/guard"]["detail"].startswith("fake/core/loss.py:2 in loss")
    assert by_base["conflict"]["core/top-k"]["state"] == "clean"  # goes on past a failure


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    write_files(folder, release("moved"))
    plain_git(folder, "init", "-q", "-b", "main")
    plain_git(folder, "add", "-A")
    plain_git(folder, "commit", "-qm", "moved")
    plain_git(folder, "tag", "v2")
    return folder


def test_local_clone_is_read_in_place(three, clone):
    states, tagged = fates(three, str(clone), f"{clone}@v2", code=0)
    assert states == tagged == {"core/guard": "clean", "core/top-k": "offset", "core/top-k-more": "offset"}
    assert "mpatch" not in plain_git(clone, "for-each-ref")


def test_base_that_cannot_be_looked_at_is_2_and_the_others_are_shown(three, clone):
    said = three.run("drift", f"{clone}@no-such", "nowhere", str(clone), "--json")
    assert said.code == 2
    assert [bool(base["error"]) for base in said.data["bases"]] == [True, True, False]
