"""Read the Chrome traces that torch's profiler writes, plain or gzipped, without holding a whole file in memory.

The profiler puts every event on lines of its own, so a file is read in blocks that are cut where an event ends. A trace
that another tool has written on one line is read whole.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import orjson

from megatron_ext.errors import UserError
from megatron_ext.trace.events import CATEGORIES, Message, Trace
from megatron_ext.tracking.rundir import RUN_FILE

BLOCK = 8 << 20
# An event ends with its brace two columns in; a text in JSON holds no line break, so no name can look like this.
_END_OF_EVENT = b"\n  },"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_SUFFIXES = (".json", ".json.gz")
_TAKE_ONE = "train with --profile --use-pytorch-profiler, see docs/trace.md"
_ITEMSIZE = {
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Short": 2, "Half": 2, "BFloat16": 2,
    "Int": 4, "Float": 4, "Long": 8, "Double": 8,
}  # fmt: skip


def find_files(places: Sequence[Path]) -> list[Path]:
    """Return the trace files of files and folders, in order of their names.

    Raises:
        UserError: A place does not exist, or a folder holds no trace.
    """
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise UserError("there is no such trace", where=str(place), remedy=_TAKE_ONE)
        files = [place]
        if place.is_dir():
            # A run directory has JSON files of its own beside the folder of the traces.
            inside = place / "torch_profile"
            folder = inside if inside.is_dir() else place
            if folder is place and (place / RUN_FILE).exists():
                raise UserError("the run has no trace", where=str(place), why=f"there is no {inside.name} in it",
                                remedy=_TAKE_ONE)  # fmt: skip
            files = sorted(path for path in folder.iterdir() if path.name.endswith(_SUFFIXES))
        if not files:
            raise UserError("the folder holds no trace", where=str(place), why="no .json or .json.gz in it",
                            remedy=_TAKE_ONE)  # fmt: skip
        found += files
    return found


def read_traces(places: Sequence[Path]) -> list[Trace]:
    """Read the traces of several ranks, sorted by rank.

    Raises:
        UserError: A file is no whole trace, or two are of the same rank.
    """
    traces = [read_trace(path) for path in find_files(places)]
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        if trace.rank is None:
            continue
        other = by_rank.setdefault(trace.rank, trace)
        if other is not trace:
            raise UserError(f"two traces are of rank {trace.rank}", where=f"{other.path}, {trace.path}",
                            remedy="name one file a rank, all of one run", exit_code=64)  # fmt: skip
    return sorted(traces, key=lambda trace: (trace.rank is None, trace.rank or 0, str(trace.path)))


def read_trace(path: Path) -> Trace:
    """Read one rank's trace.

    Raises:
        UserError: It is no trace, it is cut off, or it holds no event.
    """
    columns = _Columns()
    about: dict[str, Any] = {}
    try:
        with _open(path) as file:
            for part in _parts(file, path):
                if isinstance(part, dict):
                    about |= part
                else:
                    columns.add(part)
    except (EOFError, zlib.error) as error:
        raise _cut_off(path, str(error)) from error
    except OSError as error:
        raise UserError("the trace cannot be read", where=str(path), why=error.strerror or str(error),
                        remedy=_TAKE_ONE) from error  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise _no_trace(path, f"{type(error).__name__}: {error}") from error
    if not columns.start:
        raise UserError("the trace holds no event", where=str(path), why="the profiler ended before a step began",
                        remedy="let --profile-step-start come before the last step; see docs/trace.md")  # fmt: skip
    return columns.trace(path, about)


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def _parts(file: IO[bytes], path: Path) -> Iterator[dict[str, Any] | list[dict[str, Any]]]:
    """Yield what stands before and after the events as dicts, and the events in lists."""
    head = file.read(BLOCK)
    found = _EVENTS.search(head)
    if found is None:
        # A bare list of events is a Chrome trace as well; everything else is none.
        try:
            whole = json.loads(head + file.read())
        except ValueError as error:
            raise _no_trace(path, f"no JSON: {error}") from error
        if not isinstance(whole, list):
            raise _no_trace(path, 'there is no "traceEvents" in it')
        yield whole
        return
    if not re.match(rb"\s*\{", head[found.end() :]) or b"\n  {" not in head[found.start() : found.end() + 64]:
        yield from _whole(head + file.read(), path)
        return
    yield _about(head[: found.start()] + b'"traceEvents": []}', path)
    rest = head[found.end() :]
    while True:
        cut = rest.rfind(_END_OF_EVENT)
        if cut >= 0:
            yield _parse(b"[" + rest[: cut + 4] + b"]", path)
            rest = rest[cut + 5 :]
        more = file.read(BLOCK)
        if not more:
            break
        rest += more
    # What is left is the last event and what follows the list.
    yield from _whole(b'{"traceEvents": [' + rest, path)


def _whole(text: bytes, path: Path) -> Iterator[dict[str, Any] | list[dict[str, Any]]]:
    about = _parse(text, path)
    if not isinstance(about, dict) or not isinstance(about.get("traceEvents"), list):
        raise _no_trace(path, "its events are no list")
    yield about.pop("traceEvents")
    yield about


def _about(text: bytes, path: Path) -> dict[str, Any]:
    about = _parse(text, path)
    about.pop("traceEvents")
    return about


def _parse(text: bytes, path: Path) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        try:
            # The profiler writes bare nan and inf, which the standard library reads.
            return json.loads(text)
        except ValueError:
            if error.pos >= len(text.rstrip()) - 1 or not text.rstrip().endswith((b"}", b"]")):
                raise _cut_off(path, "it ends in the middle") from error
            raise _no_trace(path, f"no JSON: {error.msg}") from error


def _cut_off(path: Path, why: str) -> UserError:
    return UserError("the trace is cut off", where=str(path), why=f"{why}; a run that is killed leaves such a file",
                     remedy=f"leave this rank out, or take another: {_TAKE_ONE}")  # fmt: skip


def _no_trace(path: Path, why: str) -> UserError:
    return UserError("this is no trace of torch's profiler", where=str(path), why=why, remedy=_TAKE_ONE)


class _Columns:
    """Grows the columns of a trace, block after block."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.start, self.end, self.correlation, self.external = (array("q") for _ in range(4))
        self.name, self.thread = array("i"), array("i")
        self.category = array("b")
        self.messages: dict[int, Message] = {}
        # Microseconds of the first event: what is left is small enough for a float to hold nanoseconds.
        self.base: float | None = None

    def add(self, events: list[dict[str, Any]]) -> None:
        """Append the events of the kept categories."""
        numbers = {name: number for number, name in enumerate(CATEGORIES)}
        for event in events:
            number = numbers.get(event.get("cat", ""))
            if number is None or event.get("ph") != "X":
                continue
            at, took = float(event["ts"]), float(event.get("dur", 0))
            if self.base is None:
                self.base = at
            begin = round((at - self.base) * 1e3)
            args = event.get("args") or {}
            name = event["name"]
            key = (event.get("pid"), event.get("tid"))
            self.start.append(begin)
            self.end.append(begin + max(0, round(took * 1e3)))
            self.name.append(self.names.setdefault(name, len(self.names)))
            self.category.append(number)
            self.thread.append(self.threads.setdefault(key, len(self.threads)))
            self.correlation.append(int(args.get("correlation") or 0))
            self.external.append(int(args.get("External id") or args.get("external id") or 0))
            if "Collective name" in args:
                self.messages[len(self.start) - 1] = _message(args)

    def _find_messages_by_call(self) -> None:
        """Give a kernel that carries no sizes those of the call whose id it carries, where the call was recorded."""
        calls = {self.external[event]: message for event, message in self.messages.items()}
        calls.pop(0, None)
        kernel = CATEGORIES.index("kernel")
        for event, number in enumerate(self.external):
            if number in calls and self.category[event] == kernel:
                self.messages.setdefault(event, calls[number])

    def trace(self, path: Path, about: dict[str, Any]) -> Trace:
        """Return the whole, sorted."""
        start, end = np.array(self.start, np.int64), np.array(self.end, np.int64)
        order = np.lexsort((-end, start))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        self._find_messages_by_call()
        origin = round((self.base or 0.0) * 1e3) + int(about.get("baseTimeNanoseconds") or 0)
        where = about.get("distributedInfo") or {}
        return Trace(
            path=path,
            rank=_rank(path, where),
            world_size=int(where.get("world_size") or 0),
            names=list(self.names),
            threads=[(str(process), str(thread)) for process, thread in self.threads],
            start=start[order] + origin,
            end=end[order] + origin,
            name=np.array(self.name, np.int32)[order],
            category=np.array(self.category, np.int8)[order],
            thread=np.array(self.thread, np.int32)[order],
            correlation=np.array(self.correlation, np.int64)[order],
            external=np.array(self.external, np.int64)[order],
            messages={int(place[event]): message for event, message in self.messages.items()},
        )


def _rank(path: Path, where: dict[str, Any]) -> int | None:
    if "rank" in where:
        return int(where["rank"])
    named = re.search(r"rank[-_]?(\d+)", path.name)
    return int(named[1]) if named else None


def _message(args: dict[str, Any]) -> Message:
    ranks = args.get("Process Group Ranks")
    if isinstance(ranks, list):
        ranks = str(ranks)
    return Message(
        collective=str(args["Collective name"]),
        sent=int(args.get("In msg nelems") or 0),
        received=int(args.get("Out msg nelems") or 0),
        itemsize=_ITEMSIZE.get(str(args.get("dtype")), 0),
        ranks=int(args.get("Group size") or 0),
        group=f"{args.get('Process Group Description') or ''} {ranks or ''}".strip(),
    )
