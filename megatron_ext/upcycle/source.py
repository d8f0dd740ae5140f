"""Read a Megatron `torch_dist` checkpoint piece by piece, in one process and without Megatron's process groups.

A checkpoint folder holds `latest_checkpointed_iteration.txt` and one folder an iteration (or `release`). That folder
holds `.metadata` (torch's distributed-checkpoint index) and data files; every piece of a tensor is one torch-saved
blob at an offset. Layers are stacked on a leading axis ([L, ...], one piece or more a layer) where all layers are
alike, else each has its number in its name.
"""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import UserError
from megatron_ext.upcycle import safe_pickle

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


@dataclass(frozen=True)
class Piece:
    """One stored block of a tensor: where it lies in the whole and in which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor as the checkpoint describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Source:
    """An opened checkpoint: tensors by name, small objects by name, and Megatron's common state.

    Attributes:
        root: The folder that training saved to.
        folder: The iteration's folder.
        iteration: From the tracker; 0 for a release.
        tensors: Model and other tensors by name.
        objects: Location of non-tensor entries by full name (`.../shard_0_2`).
        common: Megatron's common state: `args`, `iteration`, `opt_param_scheduler` and so on.
    """

    root: Path
    folder: Path
    iteration: int
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Piece]
    common: Mapping[str, Any]

    @property
    def args(self) -> Namespace:
        """The arguments of the run that saved it."""
        return self.common["args"]

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return a block of a tensor (the whole by default), assembled from the pieces that touch it.

        Raises:
            UserError: The tensor is missing, or its pieces do not cover the block.
        """
        stored = self.tensor(name)
        offsets = tuple(offsets or (0,) * len(stored.shape))
        sizes = tuple(sizes or stored.shape)
        touching = [piece for piece in stored.pieces if _overlap(piece, offsets, sizes)]
        if len(touching) == 1 and (touching[0].offsets, touching[0].sizes) == (offsets, sizes):
            return self._blob(touching[0], stored)
        result = torch.empty(sizes, dtype=stored.dtype)
        filled = 0
        for piece in touching:
            filled += _copy_overlap(self._blob(piece, stored), piece, result, offsets)
        if filled != result.numel():
            raise UserError(
                "a tensor of the checkpoint is incomplete",
                where=f"{name} in {self.folder}",
                why=f"{filled} of {result.numel()} numbers are stored",
                remedy="take another checkpoint of the run",
            )
        return result

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor's description; UserError where it is missing."""
        if name not in self.tensors:
            raise missing(name, self)
        return self.tensors[name]

    def object_bytes(self, name: str) -> bytes:
        """Return a non-tensor entry as stored (a torch-saved list)."""
        return self._bytes(self.objects[name])

    def _blob(self, piece: Piece, stored: StoredTensor) -> Tensor:
        where = f"{stored.name} in {self.folder / piece.file}"
        data = self._bytes(piece)
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, ValueError) as error:
            raise damaged(where, str(error).splitlines()[0]) from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != piece.sizes or tensor.dtype != stored.dtype:
            raise damaged(where, f"the index promises {piece.sizes} of {stored.dtype}")
        return tensor

    def _bytes(self, piece: Piece) -> bytes:
        path = self.folder / piece.file
        with path.open("rb") as handle:
            handle.seek(piece.start)
            data = handle.read(piece.length)
        if len(data) != piece.length:
            raise damaged(str(path), f"it ends at byte {piece.start + len(data)}; a piece reaches to "
                          f"{piece.start + piece.length}")
        return data


def open_source(root: Path) -> Source:
    """Open the newest checkpoint in `root`.

    Raises:
        UserError: No checkpoint, another format, an unsafe or damaged one.
    """
    folder, iteration = _newest(root)
    _check_format(folder)
    metadata = safe_pickle.load_metadata(folder / ".metadata")
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Piece] = {}
    stored = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            objects[name] = _piece(folder, stored[(name, ())], (), ())
            continue
        pieces = tuple(
            _piece(folder, stored[(name, tuple(chunk.offsets))], tuple(chunk.offsets), tuple(chunk.sizes))
            for chunk in entry.chunks
        )
        tensors[name] = StoredTensor(name, tuple(entry.size), entry.properties.dtype, pieces)
    common = _common(folder, objects)
    return Source(root, folder, iteration, tensors, objects, common)


def missing(name: str, source: Source) -> UserError:
    """Return the error for a tensor that should be there."""
    return UserError(
        "a tensor is missing from the checkpoint",
        where=f"{name} in {source.folder}",
        remedy="give the checkpoint of a GPT model that Megatron saved with --ckpt-format torch_dist",
    )


def damaged(where: str, why: str) -> UserError:
    """Return the error for a file that does not hold what its index says."""
    return UserError("the checkpoint is damaged", where=where, why=why, remedy="take another checkpoint of the run")


def _saves_near(root: Path) -> str:
    """Say where the checkpoints are if one was meant: around an iteration's folder, or in a run's `checkpoints`."""
    near = [folder for folder in (root.parent, root / "checkpoints") if (folder / TRACKER).is_file()]
    return f"give {near[0]}" if near else ""


def _newest(root: Path) -> tuple[Path, int]:
    tracker = root / TRACKER
    if not tracker.is_file():
        raise UserError(
            "there is no checkpoint here",
            where=str(root),
            why=f"{TRACKER} does not exist in it",
            remedy=_saves_near(root) or "give the folder that the run saved to (its --save)",
        )
    word = tracker.read_text().strip()
    if word == RELEASE:
        return _existing(root / RELEASE, tracker), 0
    if not word.isdigit():
        raise damaged(str(tracker), f"it says {word[:40]!r}, neither an iteration nor {RELEASE!r}")
    return _existing(root / f"iter_{int(word):07d}", tracker), int(word)


def _existing(folder: Path, tracker: Path) -> Path:
    if not folder.is_dir():
        raise damaged(str(tracker), f"it names {folder.name}, which does not exist")
    return folder


def _check_format(folder: Path) -> None:
    note = folder / "metadata.json"
    found = json.loads(note.read_text()).get("sharded_backend") if note.is_file() else "none"
    if found != "torch_dist" or not (folder / ".metadata").is_file():
        raise UserError(
            "only torch_dist checkpoints can be read",
            where=str(folder),
            why=f"its format is {found!r}, or its index is missing",
            remedy="load it with Megatron and save it with --ckpt-format torch_dist",
        )


def _piece(folder: Path, info: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
    name = str(info.relative_path)
    if Path(name).name != name or not (folder / name).is_file():
        raise damaged(str(folder), f"its index points to {name!r}, which is not a file in it")
    if getattr(info, "transform_descriptors", None):
        raise damaged(str(folder / name), f"it is stored as {info.transform_descriptors}, which is not supported")
    end, size = int(info.offset) + int(info.length), (folder / name).stat().st_size
    if end > size:
        raise damaged(str(folder / name), f"it ends at byte {size}; the index reaches to {end}")
    return Piece(offsets, sizes, name, int(info.offset), int(info.length))


def _common(folder: Path, objects: Mapping[str, Piece]) -> Mapping[str, Any]:
    names = [name for name in objects if name.startswith("common_state/")]
    if names:
        piece = objects[names[0]]
        with (folder / piece.file).open("rb") as handle:
            handle.seek(piece.start)
            common = safe_pickle.load_common(handle.read(piece.length), folder / piece.file)
        common = common[0] if isinstance(common, list) else common
    elif (folder / "common.pt").is_file():
        common = safe_pickle.load_common((folder / "common.pt").read_bytes(), folder / "common.pt")
    else:
        common = {}
    if not isinstance(common, dict) or not isinstance(common.get("args"), Namespace):
        raise damaged(str(folder), "it has no Megatron arguments (`args`) in its common state")
    return common


def _overlap(piece: Piece, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return all(
        mine < start + size and start < mine + length
        for mine, length, start, size in zip(piece.offsets, piece.sizes, offsets, sizes, strict=True)
    )


def _copy_overlap(block: Tensor, piece: Piece, result: Tensor, offsets: tuple[int, ...]) -> int:
    read, write = [], []
    for mine, length, start, size in zip(piece.offsets, piece.sizes, offsets, result.shape, strict=True):
        low, high = max(mine, start), min(mine + length, start + size)
        read.append(slice(low - mine, high - mine))
        write.append(slice(low - start, high - start))
    part = block[tuple(read)]
    result[tuple(write)] = part
    return part.numel()
