from __future__ import annotations

import sys

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


def test_a_file_changed_behind_the_patch_is_an_offset_of_nothing(three):
    variant(three, "later", fake__core__router=FILES["fake/core/router.py"] + "\n\ndef more():\n    return 1\n")
    said = three.run("drift", "later", "--offline", str(three.shelf), "--json")
    (top_k,) = [fate for fate in said.data["bases"][0]["fates"] if fate["slug"] == "core/top-k"]
    assert (top_k["state"], top_k["detail"]) == ("offset", "same lines, changed elsewhere")


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


def cloned(folder, **files):
    write_files(
        folder, {**release("clean"), **{f"fake/{name.replace('__', '/')}.py": text for name, text in files.items()}}
    )
    plain_git(folder, "init", "-q", "-b", "main")
    plain_git(folder, "add", "-A")
    plain_git(folder, "commit", "-qm", "later")
    return str(folder)


PROOFS = """
from fake.core.loss import loss


def test_empty_mean_is_no_crash():
    assert loss([]) == 0
"""
NO_IMPORT = "from fake.core.gone import nothing\n\n\ndef test_nothing():\n    pass\n"


def test_the_proof_finds_what_upstream_mended_in_its_own_words(three, tmp_path):
    (three.root / "tests").mkdir()
    (three.root / "tests/test_fake.py").write_text(PROOFS)
    message = three.good("show", "guard", "--message").out
    (three.root / "m.txt").write_text(
        message.replace("tests/test_x.py::test_x", "tests/test_fake.py::test_empty_mean_is_no_crash").replace(
            "Upstream-Status: Pending", "Upstream-Status: Backport [#12]"
        )
    )
    three.good("refresh", "guard", "--message", str(three.root / "m.txt"))
    mended = cloned(
        tmp_path / "a", core__loss="def loss(values):\n    return sum(values) / len(values) if values else 0\n"
    )
    broken = cloned(tmp_path / "b", core__loss="def loss(values):\n    return sum(values) / n\n")

    said = three.run("drift", mended, broken, "--json")
    for base in said.data["bases"]:
        (guard,) = [fate for fate in base["fates"] if fate["slug"] == "core/guard"]
        assert guard["state"] == "conflict"
        assert "Backport [#12]: upstream may have it, --prove asks" in guard["detail"]

    said = three.run("drift", mended, broken, "--prove", "--python", sys.executable, "--json")
    by_base = [next(fate for fate in base["fates"] if fate["slug"] == "core/guard") for base in said.data["bases"]]
    assert by_base[0]["state"] == "absorbed"
    assert by_base[1]["state"] == "conflict"
    assert by_base[1]["detail"].endswith("its proof is red (NameError: name 'n' is not defined) without it")

    text = (three.root / "m.txt").read_text()
    (three.root / "m.txt").write_text(text.replace("Signed-off-by", "Proof-Fails-With: ZeroDivision\nSigned-off-by"))
    three.good("refresh", "guard", "--message", str(three.root / "m.txt"))
    said = three.run("drift", broken, "--prove", "--python", sys.executable, "--json")
    (guard,) = [fate for fate in said.data["bases"][0]["fates"] if fate["slug"] == "core/guard"]
    assert "red, but not for the reason stated, (NameError" in guard["detail"]


def test_one_proof_that_cannot_be_imported_silences_no_other(three, tmp_path):
    (three.root / "tests").mkdir()
    for slug, text, proof in (
        ("guard", PROOFS, "tests/test_fake.py::test_empty_mean_is_no_crash"),
        ("top-k", NO_IMPORT, "tests/test_gone.py::test_nothing"),
    ):
        (three.root / proof.partition("::")[0]).write_text(text)
        message = three.good("show", slug, "--message").out
        (three.root / "m.txt").write_text(message.replace("tests/test_x.py::test_x", proof))
        three.good("refresh", slug, "--message", str(three.root / "m.txt"))
    later = cloned(
        tmp_path / "later",
        core__loss="def loss(values):\n    return sum(values) / len(values) if values else 0\n",
        core__router="class Router:\n    pass\n",
    )
    said = three.run("drift", later, "--prove", "--python", sys.executable, "--json")
    states = {fate["slug"]: fate for fate in said.data["bases"][0]["fates"]}
    assert states["core/guard"]["state"] == "absorbed"
    assert "no verdict" in states["core/top-k"]["detail"]


def test_text_that_merges_but_does_not_compile_does_not_fit(three, tmp_path):
    three.add_patch("core/total", "fake/train.py", "    return done\n", "    global total\n    return done\n")
    later = cloned(tmp_path / "later", train=release("clean")["fake/train.py"].replace("(steps)", "(steps, total)"))
    said = three.run("drift", later, "--json")
    (fate,) = [fate for fate in said.data["bases"][0]["fates"] if fate["slug"] == "core/total"]
    assert fate["state"] == "conflict"
    assert fate["detail"].startswith("merges, but does not compile there: fake/train.py:")
