"""The verb: table, page, JSON, import, and its errors."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import make_run

from megatron_ext.cli import main


def test_table_and_page(quickstart, tmp_path: Path, capsys) -> None:
    page = tmp_path / "report.html"
    assert main(["report", *map(str, quickstart), "-o", str(page)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "dense-continued" in out
    assert re.search(r"largest held-out gap is 0\.\d+, at .* moe is below dense-continued", out)
    assert page.stat().st_size < 3_000_000


def test_a_run_named_twice_is_one_run(quickstart, capsys) -> None:
    assert main(["report", str(quickstart[0]), f"{quickstart[0]}/", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_json_is_only_json(quickstart, capsys) -> None:
    assert main(["report", *map(str, quickstart), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in rows] == ["dense", "moe", "dense-continued"]
    assert rows[1]["alarms"] == 2


def test_page_names_no_other_address(quickstart, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    main(["report", str(quickstart[1]), "-o", str(page)])
    text = page.read_text()
    own = text[: text.index("/* BEGIN bokeh")] + text[text.index("Draws each chart") :]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", own)


def test_import_brings_a_run_in_once(quickstart, tmp_path: Path, capsys) -> None:
    for added, there in ((150, 0), (0, 150)):
        assert main(["report", "--import", str(quickstart[0]), "--trackio-dir", str(tmp_path / "t")]) == 0
        assert f"{added} rows added, 0 taken out, {there} were there" in capsys.readouterr().out
    connection = sqlite3.connect(tmp_path / "t" / "demo.db")
    assert connection.execute("SELECT count(DISTINCT step), count(DISTINCT run_id) FROM metrics").fetchone() == (150, 1)


def test_import_into_a_file_says_why(quickstart, tmp_path: Path, capsys) -> None:
    (tmp_path / "t").write_text("")
    assert main(["report", "--import", str(quickstart[0]), "--trackio-dir", str(tmp_path / "t")]) == 1
    error = capsys.readouterr().err
    assert "Trackio did not take the run" in error
    assert "try:" in error


@pytest.mark.parametrize("bad", ["missing", "empty"])
def test_no_run_is_a_clear_error_and_no_page(tmp_path: Path, capsys, bad: str) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / bad), "-o", str(tmp_path / "r.html")]) == 1
    assert "run" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_page_that_cannot_be_written_leaves_nothing(quickstart, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["report", str(quickstart[0]), "-o", str(tmp_path / "file" / "r.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_run_that_only_began_has_a_report(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"id": "x", "name": "new", "starts": [{"time": 1, "iteration": 0}]}))
    assert main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    assert "has logged no loss yet" in " ".join(capsys.readouterr().out.split())


def test_report_needs_neither_torch_nor_trackio(quickstart) -> None:
    script = (
        "import sys; from megatron_ext.cli import main; main(['report', sys.argv[1]]); "
        "sys.exit(bool({'torch', 'trackio', 'megatron'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", script, str(quickstart[1])], check=False, capture_output=True).returncode
        == 0
    )


def test_a_name_with_markup_is_text_everywhere(tmp_path: Path, capsys) -> None:
    name = "moe[aux] [/] <script>alert(1)</script>"
    folder = make_run(tmp_path / "run", steps=20, layers=2, experts=4)
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "name": name}))
    assert main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    assert "moe[aux] [/]" in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "r.html").read_text()
    assert "<script>alert" not in page
    assert "moe[aux] [/] &lt;script&gt;" in page
