"""Unpickle what torch_dist checkpoints hold without running code from them: a checkpoint is a file from a stranger.

A pickle names the callables that build its objects. Only inert ones are allowed here (plain records, enumerations,
shapes, dtypes); anything else is refused by name, before it is imported.
"""

from __future__ import annotations

import importlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch

from megatron_ext.errors import UserError

_DCP = "torch.distributed.checkpoint"

# Global names that a `.metadata` file needs. All build records; none acts.
_METADATA_NAMES = frozenset(
    {
        (f"{_DCP}.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    }
    | {
        (f"{_DCP}.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("builtins", "set"),
        ("pathlib", "PosixPath"),
        ("builtins", "frozenset"),
        ("collections", "OrderedDict"),
    }
)

# Classes that Megatron's common state is made of, beyond what torch itself allows: enumerations and plain records.
_COMMON_NAMES = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "signal.Signals",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
)


class _Stub:
    """Stands for records of other versions that we read past (Megatron 0.15's own metadata class)."""


_STUBS = {
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STUBS:
            return _Stub
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _METADATA_NAMES and not is_dtype:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def load_metadata(path: Path) -> Any:
    """Read a `.metadata` file.

    Raises:
        UserError: It names a class outside the allow-list, or is damaged.
    """
    try:
        return _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from error
    except (EOFError, ValueError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise UserError(
            "the checkpoint's index cannot be read",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            remedy="take another checkpoint of the run; this one is damaged or from an unknown version",
        ) from error


def load_common(data: bytes, where: Path) -> Any:
    """Read a torch-saved object that is not a tensor (Megatron's arguments, iteration, scheduler).

    Raises:
        UserError: It names a class outside the allow-list.
    """
    allowed = [_import(name) for name in _needed(data, where)]
    with torch.serialization.safe_globals(allowed):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _needed(data: bytes, where: Path) -> list[str]:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except (RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(
            "a part of the checkpoint cannot be read",
            where=str(where),
            why=str(error),
            remedy="take another checkpoint of the run; this one is damaged",
        ) from error
    strange = sorted(set(names) - set(_COMMON_NAMES))
    if strange:
        raise _refused(where, ", ".join(strange))
    return sorted(names)


def _import(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _refused(where: Path, met: str) -> UserError:
    return UserError(
        "the checkpoint holds something that is not plain data",
        where=str(where),
        why=f"reading it would run or build {met}, which is not on the list of harmless classes",
        remedy="load it once with Megatron, if you trust its source, and save it again",
    )
