"""Megatron's own builder and reader of indexed files, imported quietly and late (the import takes seconds).
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from megatron_ext.errors import UserError


def megatron_indexed() -> Any:
    """Return `megatron.core.datasets.indexed_dataset`.

    Raises:
        UserError: Megatron cannot be imported.
    """
    # Without a GPU, torch and Megatron announce at import everything that they do not find; none of it
    # matters here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Outside a training job there is no rank, and every log line of the reader would say so.
    warnings.filterwarnings("ignore", message="Could not determine rank")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets import indexed_dataset
    except ImportError as error:
        raise UserError(
            "Megatron cannot be imported",
            where="megatron.core.datasets.indexed_dataset",
            why=str(error),
            remedy="run `make setup`, and use this checkout's .venv",
        ) from error
    return indexed_dataset
