"""Change one stored block of a checkpoint in place, as a fault in a converter or on a disk would."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_ext.upcycle.source import open_source


def sabotage(root: Path, name: str, offsets: tuple[int, ...], edit: Callable[[torch.Tensor], None]) -> None:
    """Change the stored piece of a tensor at `offsets`; the file keeps its length."""
    source = open_source(root)
    piece = next(one for one in source.tensors[name].pieces if one.offsets == offsets)
    path = source.folder / piece.file
    data = path.read_bytes()
    tensor = torch.load(io.BytesIO(data[piece.start : piece.start + piece.length]), weights_only=True)
    edit(tensor)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    assert len(buffer.getvalue()) == piece.length
    path.write_bytes(data[: piece.start] + buffer.getvalue() + data[piece.start + piece.length :])
