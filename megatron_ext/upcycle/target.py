"""Write a Megatron `torch_dist` checkpoint piece by piece: each block is made when its turn comes, then forgotten.

torch's own checkpoint writer does the writing; the planner here only tells it what there is and makes each block on
demand. Nothing loads as complete before it is: the blocks go to a hidden folder beside the final one, which is renamed
when all is on disk, and Megatron's tracker file comes last.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_ext.errors import UserError
from megatron_ext.upcycle.source import TRACKER

_PARTIAL = ".upcycle-partial-"


@dataclass(frozen=True)
class Block:
    """One block of a tensor that is still to be made.

    Attributes:
        name: The tensor's name in the checkpoint.
        shape: Of the whole tensor.
        dtype: Of the tensor.
        offsets: Where the block lies in the whole.
        sizes: Of the block.
        make: Returns the block; called once, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of the block in bytes."""
        return self.dtype.itemsize * int(torch.Size(self.sizes).numel())


@dataclass(frozen=True)
class Content:
    """All that goes into a checkpoint: blocks in writing order, small objects as stored bytes, notes as JSON files."""

    blocks: Sequence[Block]
    objects: Mapping[str, bytes]
    notes: Mapping[str, Mapping[str, Any]]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(block.num_bytes for block in self.blocks)


def saved_bytes(value: Any) -> bytes:
    """Return an object as Megatron stores a sharded object: a torch-saved list of one."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()


def check_target(root: Path, *, num_bytes: int) -> None:
    """Raise UserError where a checkpoint stands already or the disk is too small; writes nothing."""
    if (root / TRACKER).exists() or any(root.glob("iter_*")) or (root / "release").exists():
        raise UserError(
            "the target folder already holds a checkpoint",
            where=str(root),
            why="going on would mix two models",
            remedy="give a new folder",
        )
    if root.exists() and not root.is_dir():
        raise UserError("the target is not a folder", where=str(root), remedy="give a new folder")
    near = next(parent for parent in [root, *root.absolute().parents] if parent.exists())
    free = shutil.disk_usage(near).free
    if free < num_bytes * 1.02:
        raise UserError(
            "the disk is too small for the new checkpoint",
            where=f"{near}: {free / 1e9:.1f} GB free",
            why=f"the checkpoint takes {num_bytes / 1e9:.1f} GB",
            remedy="make room or give another folder",
        )


def write_checkpoint(root: Path, folder: str, tracker: str, content: Content,
                     *, progress: Callable[[Block], None] = lambda block: None) -> Path:
    """Write a whole checkpoint and return its folder.

    Args:
        root: The folder that training will load; made if needed.
        folder: `release` or `iter_0000012`.
        tracker: What the tracker file says (`release` or `12`).
        content: What to write.
        progress: Called after each block is made.
    """
    root.mkdir(parents=True, exist_ok=True)
    with _partial_folder(root) as partial:
        _save(partial, _LazyPlanner(content, progress))
        _write_json(partial / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        for name, note in content.notes.items():
            _write_json(partial / name, note)
        _sync(partial)
        os.replace(partial, root / folder)
    _sync(root)
    temporary = root / f".{TRACKER}.new"
    temporary.write_text(tracker)
    os.replace(temporary, root / TRACKER)
    _sync(root)
    return root / folder


def _save(folder: Path, planner: SavePlanner) -> None:
    try:
        with warnings.catch_warnings():
            # torch says that one process saves; that is meant.
            warnings.simplefilter("ignore", UserWarning)
            save({}, storage_writer=FileSystemWriter(str(folder), sync_files=True), planner=planner, no_dist=True)
    except CheckpointException as error:
        # torch wraps what happened while a block was made; the user's error is inside.
        cause = next((one[0] for one in error.failures.values() if isinstance(one[0], UserError)), error)
        raise cause from None


@contextlib.contextmanager
def _partial_folder(root: Path) -> Iterator[Path]:
    """Yield a hidden folder, locked while this process lives; clear away those of processes that were killed."""
    _clear_left_over(root)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=root))
    lock_path = root / f"{partial.name}.lock"
    try:
        with lock_path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            partial.chmod(0o755)
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock_path.unlink(missing_ok=True)


def _clear_left_over(root: Path) -> None:
    for lock_path in root.glob(f"{_PARTIAL}*.lock"):
        with contextlib.suppress(BlockingIOError), lock_path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
            lock_path.unlink(missing_ok=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=None if path.name == "metadata.json" else 1))


def _sync(folder: Path) -> None:
    for path in [*folder.glob("*.json"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class _LazyPlanner(SavePlanner):
    """Plans the blocks of `Content` for torch's checkpoint writer and makes each when it is asked for."""

    def __init__(self, content: Content, progress: Callable[[Block], None]) -> None:
        self._content = content
        self._blocks = {(block.name, block.offsets): block for block in content.blocks}
        self._progress = progress

    def set_up_planner(self, state_dict: Any, storage_meta: StorageMeta | None = None,
                       is_coordinator: bool = False) -> None:
        """Nothing to set up: the state dict is empty and the content is known."""

    def create_local_plan(self) -> SavePlan:
        """Plan every object and block of the content."""
        objects = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._content.objects]
        return SavePlan([*objects, *(_write_item(block) for block in self._content.blocks)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Let torch make the index from the plan."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keep the plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Make one block."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._content.objects[write_item.index.fqn])
        block = self._blocks[(write_item.index.fqn, tuple(write_item.index.offset or ()))]
        tensor = block.make()
        if tuple(tensor.shape) != block.sizes or tensor.dtype != block.dtype:
            raise AssertionError(f"{block.name} at {block.offsets}: made {tuple(tensor.shape)} {tensor.dtype}, "
                                 f"planned {block.sizes} {block.dtype}")
        self._progress(block)
        return tensor


def _write_item(block: Block) -> WriteItem:
    # Exactly the fields that Megatron's own checkpoints carry.
    return WriteItem(
        MetadataIndex(block.name, block.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes)),
            properties=TensorProperties(dtype=block.dtype),
            size=torch.Size(block.shape),
        ),
    )
