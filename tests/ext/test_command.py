"""`megatron-moe` with wrong words, wrong numbers, unusable files, and readers and people who break off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.cli import VERBS, main

COMMAND = [sys.executable, "-m", "megatron_ext.cli"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["repot"], "did you mean report?"),
        (["upcycle verfy", "a", "b"], "did you mean upcycle verify?"),
        (["zzz"], "see `megatron-moe --help`"),
        (["report", "--outptu", "x", "run"], "did you mean --output?"),
        (
            ["plan", "dispatch", "--exprts", "3"],
            "did you mean --experts? All flags: `megatron-moe plan dispatch --help`",
        ),
        (["plan", "memroy"], "invalid choice: 'memroy'"),
        (["train", "--num-layers", "2"], "behind a lone --"),
        (["plan", "memory", "--num-layers", "2"], "behind a lone --"),
        (["plan", "memory", "--", "--num-layers", "four"], "--num-layers: 'four' is not a whole number"),
        (["plan", "dispatch", "--ep", "0"], "--ep: '0' is not a whole number of 1 or more"),
        (["plan", "dispatch", "--ranks-per-node", "0"], "--ranks-per-node: '0'"),
        (["plan", "dispatch", "--nic-gbps", "0"], "--nic-gbps: '0' is not a number above 0"),
        (["plan", "dispatch", "--skew", "nan"], "--skew: 'nan' is not a number of 0 or more"),
        (["plan", "upcycle", "--tokens", "1B", "--dense-tokens", "1B", "--num-experts", "0"], "--num-experts: '0'"),
        (["bench", "dispatch", "--repeats", "0"], "--repeats: '0'"),
        (["bench", "dispatch", "--ranks", "3"], "do not divide over the ranks"),
        (["bench", "dispatch", "--ranks", "2", "--top-k", "65"], "cannot choose that many experts"),
        (["preflight", "--size", "12Q"], "not a message size"),
    ],
)
def test_wrong_words_get_one_short_answer(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 64
    told = capsys.readouterr()
    assert says in told.err
    assert told.err.startswith("error: ")
    assert len(told.err.splitlines()) <= 4
    assert told.out == ""


def test_a_dump_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--from", str(tmp_path / "gone")]) == 1
    assert "why:   it does not exist" in capsys.readouterr().err


def test_judging_a_folder_that_is_not_there_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", "judge", "--out", str(tmp_path / "parts")]) == 2
    assert "no such folder of parts" in capsys.readouterr().err
    assert not (tmp_path / "parts").exists()


def test_a_mistyped_flag_of_megatron_is_named_with_its_neighbour() -> None:
    done = subprocess.run(
        [*COMMAND, "train", "--device", "cpu", "--", "--num-layerz", "2"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 64
    assert "error: unrecognized arguments: --num-layerz 2" in done.stderr
    assert "did you mean --num-layers? All flags: `megatron-moe train -- --help`" in done.stderr
    assert "usage:" not in done.stderr
    assert len(done.stderr.splitlines()) < 10


@pytest.mark.parametrize(
    "words", [["help"], ["help", "report"], ["--help"], ["report", "--help"], ["plan", "memory", "-h"]]
)
def test_help_is_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "usage: megatron-moe" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    assert f"usage: megatron-moe {verb}" in capsys.readouterr().out


def test_a_file_where_a_folder_should_be_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One document of a few words.\n" * 50)
    words = ["tokenize", "--input", str(text), "--output", str(text), "--train-tokenizer", "--vocab-size", "300"]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "why:   Not a directory" in told
    assert str(text) in told


@pytest.mark.parametrize("words", [["--help"], ["plan", "dispatch"], ["plan", "dispatch", "--json"]])
def test_a_full_disk_is_no_traceback(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "why:   No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 4


def test_a_reader_that_has_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, "--help"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_is_one_word(tmp_path: Path) -> None:
    # A pipe that nobody writes to: the command waits in it for its first document.
    os.mkfifo(tmp_path / "text.txt")
    words = ["tokenize", "--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--train-tokenizer"]
    running = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=_interruptible)  # fmt: skip
    writer = os.open(tmp_path / "text.txt", os.O_WRONLY)  # returns once the command reads
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=60)
    os.close(writer)
    assert running.returncode == 130
    assert told.strip() == "interrupted"


def _interruptible() -> None:
    # A runner in the background hands on an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_pipe_gets_whole_tables(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run([*COMMAND, "preflight", "judge", "--out", str(tmp_path)], capture_output=True, text=True,
                          env=environ, timeout=60)  # fmt: skip
    assert max(map(len, done.stdout.splitlines())) > 80
