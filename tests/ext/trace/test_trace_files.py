"""Files: layouts that are read alike, and what is said about files that are no good."""

from __future__ import annotations

import gzip
import json

import made
import numpy as np

from megatron_ext.cli import main
from megatron_ext.trace import read, read_trace, read_traces


def _trace(rank: int | None = 0) -> made.Made:
    trace = made.Made(rank, clock=5149698006157.378)
    trace.step(3, 0, 400)
    for at in range(50):
        trace.op("aten::mm", at * 8, 5)
        trace.kernel(made.GEMM, at * 8 + 2, 4.125, launched=at * 8 + 1)
    trace.all_to_all(390, 8)
    return trace


def test_blocks_packing_and_layout_make_no_difference(tmp_path, monkeypatch):
    trace = _trace()
    files = [trace.write(tmp_path), trace.write(tmp_path, packed=True)]
    one_line = tmp_path / "one-line-rank-0.json"
    one_line.write_text(json.dumps(trace.document()))
    bare = tmp_path / "bare-rank-0.json"
    bare.write_text(json.dumps(trace.events))
    whole = [read_trace(path) for path in (*files, one_line, bare)]
    for size in (300, 1000, 4096):  # cut inside events, names and the head
        monkeypatch.setattr(read, "BLOCK", size)
        if size > 300:  # the head must hold the first event's beginning
            whole.append(read_trace(files[0]))
    first = whole[0]
    assert len(first) == 1 + 50 * 3 + 1
    assert first.rank == 0
    assert first.world_size == 2
    for other in whole[1:]:
        assert [first.names[number] for number in first.name] == [other.names[number] for number in other.name]
        for column in ("start", "end", "category", "correlation"):
            assert np.array_equal(getattr(first, column), getattr(other, column)), (other.path, column)
        assert other.messages.keys() == first.messages.keys()


def test_nanoseconds_survive_large_time_stamps(tmp_path):
    trace = read_trace(_trace().write(tmp_path))
    kernels = trace.on_device & (np.array(trace.names, object)[trace.name] == made.GEMM)
    # A float of microseconds since the start of the machine holds about a nanosecond.
    assert abs((trace.end - trace.start)[kernels] - 4125).max() <= 1
    assert abs(np.diff(trace.start[kernels]) - 8000).max() <= 2


def _fails(capsys, *words: str) -> str:
    assert main(["trace", *words]) in (1, 64)
    said = capsys.readouterr().err
    assert said.startswith("error:")
    assert "try:" in said
    return said


def test_what_is_said_about_bad_files(tmp_path, capsys):
    good = _trace().write(tmp_path / "good")
    text = good.read_bytes()

    def file(name: str, data: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(data)
        return str(path)

    packed = gzip.compress(text)
    assert "cut off" in _fails(capsys, file("cut.json", text[: len(text) // 2]))
    assert "cut off" in _fails(capsys, file("cut.json.gz", packed[: len(packed) // 2]))
    assert "cut off" in _fails(capsys, file("torn.json", text[: text.rindex(b"  ],")]))
    assert "no trace" in _fails(capsys, file("other.json", b'{"a": 1}'))
    assert "no trace" in _fails(capsys, file("list.json", b"[1, 2]"))
    assert "no trace" in _fails(capsys, file("text.json", b"hello"))
    assert "no trace" in _fails(capsys, file("damaged.json", text.replace(b'"ts": ', b'"ts" ', 1)))
    assert "no event" in _fails(capsys, file("empty.json", b'{"traceEvents": []}'))
    assert "no trace" in _fails(capsys, file("nothing.json", b""))
    assert "no such trace" in _fails(capsys, str(tmp_path / "gone"))
    (tmp_path / "folder").mkdir()
    assert "holds no trace" in _fails(capsys, str(tmp_path / "folder"))


def test_what_is_said_about_traces_that_do_not_fit_together(tmp_path, capsys):
    good = str(_trace().write(tmp_path / "good"))
    again = str(_trace().write(tmp_path / "again"))
    assert "two traces are of rank 0" in _fails(capsys, good, again)
    assert "step 9 is not in the trace" in _fails(capsys, good, "--step", "9")
    assert "rank 5 is not among" in _fails(capsys, good, "--rank", "5")
    host = made.Made(1)
    host.step(3, 0, 10)
    host.op("aten::mm", 1, 5)
    assert "some do not" in _fails(capsys, good, str(host.write(tmp_path / "host")))
    bare = made.Made(0)
    bare.step(3, 0, 10)
    assert "holds no work" in _fails(capsys, str(bare.write(tmp_path / "bare")))
    assert "overwrite a trace" in _fails(capsys, good, "--json", again)
    assert read_trace(tmp_path / "again" / "rank-0.json").rank == 0


def test_a_run_that_was_not_profiled_says_so(tmp_path, capsys):
    for name in ("run.json", "observe.json"):
        (tmp_path / name).write_text("{}")
    said = _fails(capsys, str(tmp_path))
    assert "the run has no trace" in said
    assert "observe.json" not in said


def test_missing_ranks_and_unmarked_steps_are_said(tmp_path, capsys):
    path = _trace().write(tmp_path)
    assert main(["trace", str(path)]) == 0
    assert "the job had 2 ranks; not among the traces: 1" in capsys.readouterr().out
    unmarked = made.Made(None)
    unmarked.kernel(made.GEMM, 100, 50)
    assert main(["trace", str(unmarked.write(tmp_path / "unmarked", "trace.json"))]) == 0
    said = capsys.readouterr().out
    assert "no step is marked" in said
    assert "names no rank" in said


def test_the_table_and_the_json(tmp_path, capsys):
    made.two_ranks(tmp_path / "run" / "torch_profile")
    (tmp_path / "run" / "run.json").write_text("{}")
    out = tmp_path / "new" / "trace.json"
    assert main(["trace", str(tmp_path / "run"), "--json", str(out)]) == 0  # the run directory finds its folder
    said = capsys.readouterr().out
    for part in ("where the span went", "grouped GEMM", "all-to-all", "who keeps whom waiting", "look at first: "):
        assert part in said
    written = json.loads(out.read_text())
    for rank in written["ranks"]:
        assert sum(row["span_ns"] for row in rank["rows"]) == rank["span_ns"] == 1_000_000
    assert written["comparison"]["caused_ns"] == [0, 40_000]
    assert main(["trace", str(tmp_path / "run"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == written


def test_ranks_are_sorted_and_found_in_names(tmp_path):
    for rank in (10, 2):
        _trace(rank).write(tmp_path)
    _trace(None).write(tmp_path, "rank-3.json")
    assert [trace.rank for trace in read_traces([tmp_path])] == [2, 3, 10]
