"""A trace of one rank as columns: what the reader makes and everything else reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trace.intervals import Times

# Categories of torch's profiler that are kept, as numbers of the column `category`.
CATEGORIES = (
    "cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset",
)  # fmt: skip
CPU_OP, ANNOTATION, PYTHON, RUNTIME, DRIVER, KERNEL, MEMCPY, MEMSET = range(len(CATEGORIES))
_STEP = re.compile(r"ProfilerStep#(\d+)$")


def is_step_mark(name: str) -> bool:
    """Return whether a name is the profiler's mark of a step, which stands around everything and says nothing."""
    return _STEP.match(name) is not None


@dataclass(frozen=True)
class Message:
    """What the profiler recorded of a collective's call.

    Args:
        collective: torch's name, e.g. `all_to_allv`.
        sent: Elements that go in, of this rank.
        received: Elements that come out, of this rank.
        itemsize: Bytes of an element; 0 where the type is unknown.
        ranks: Number of ranks of the group.
        group: The group's ranks as text, with its description: the same on each of its ranks.
    """

    collective: str
    sent: int
    received: int
    itemsize: int
    ranks: int
    group: str


@dataclass(frozen=True)
class Trace:
    """One rank's events, sorted by start; of equal starts the longer first.

    Args:
        path: The file.
        rank: As the trace or the file's name says; None where neither does.
        world_size: Ranks of the job; 0 where the trace does not say.
        names: Name of each name number.
        threads: Process and thread of each thread number.
        start: [events] int64, nanoseconds on the rank's own clock, from an arbitrary point that all its files share.
        end: [events] int64, nanoseconds.
        name: [events] int32, number of the name.
        category: [events] int8, number in CATEGORIES.
        thread: [events] int32, number of the thread (of a stream, for what runs on the GPU).
        correlation: [events] int64, what joins a launch to its kernel; 0 for none.
        external: [events] int64, what joins a kernel to the operator that called it; 0 for none.
        messages: Of collectives, by event.
    """

    path: Path
    rank: int | None
    world_size: int
    names: list[str]
    threads: list[tuple[str, str]]
    start: Times
    end: Times
    name: NDArray[np.int32]
    category: NDArray[np.int8]
    thread: NDArray[np.int32]
    correlation: Times
    external: Times
    messages: Mapping[int, Message] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def on_device(self) -> NDArray[np.bool_]:
        """[events] bool: kernels and copies."""
        return self.category >= KERNEL

    @cached_property
    def by_gloo(self) -> NDArray[np.bool_]:
        """[events] bool: collectives that gloo's own threads ran on the CPU."""
        gloo = np.array([name.startswith("gloo:") for name in self.names], bool)
        return (self.category == ANNOTATION) & gloo[self.name]

    @property
    def has_device(self) -> bool:
        """Whether the GPU was recorded."""
        return bool(self.on_device.any())

    @cached_property
    def steps(self) -> dict[int, tuple[int, int]]:
        """Start and end of each recorded step, by its number in torch's profiler."""
        found: dict[int, tuple[int, int]] = {}
        for number, name in enumerate(self.names):
            matched = _STEP.match(name)
            if matched:
                rows = np.flatnonzero((self.name == number) & (self.category == ANNOTATION))
                if len(rows):
                    found[int(matched[1])] = (int(self.start[rows].min()), int(self.end[rows].max()))
        return dict(sorted(found.items()))

    def name_of(self, event: int) -> str:
        """Return an event's name."""
        return self.names[self.name[event]]
