"""Which data label each data set of the blend has, so that a token's expert can be held against its source."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from megatron_ext.errors import UserError


def labels_of_run(args: argparse.Namespace, given: str) -> tuple[str, ...]:
    """Return the label of each training data set, in the order of the blend; () where nobody labelled them.

    Args:
        args: Megatron's arguments; `moe_ext_manifest` names the manifest, where there is one.
        given: `--moe-ext-observe-sources`, which wins over the manifest.

    Raises:
        UserError: The flag names another number of data sets than the blend has.
    """
    prefixes = _prefixes(args)
    words = tuple(word.strip() for word in given.split(",") if word.strip())
    if words:
        if prefixes and len(words) != len(prefixes):
            raise UserError(
                "every data set of the blend needs a label, and only one",
                where=f"--moe-ext-observe-sources {given}: {len(words)} labels, {len(prefixes)} data sets",
                remedy="name one label a data set, in the order of the data flags",
                exit_code=64,
            )
        return words
    manifest = getattr(args, "moe_ext_manifest", None)
    if not manifest or len(prefixes) < 2:
        return ()
    from megatron_ext.data import labels_by_prefix, load_manifest

    return match(prefixes, labels_by_prefix(load_manifest(manifest)))


def match(prefixes: Sequence[str], labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return each prefix's label; () where one of them has none, since a share of unknown tokens says nothing."""
    known = {os.path.realpath(prefix): label for prefix, label in labels.items()}
    found = [known.get(os.path.realpath(prefix), "") for prefix in prefixes]
    return tuple(found) if all(found) else ()


def _prefixes(args: argparse.Namespace) -> list[str]:
    """Return the training data's prefixes in the blend's order, as Megatron itself reads its flags."""
    from megatron.training.utils import get_blend_and_blend_per_split

    if getattr(args, "mock_data", False) or not hasattr(args, "data_path"):
        return []
    blend, per_split = get_blend_and_blend_per_split(args)
    train = blend or (per_split[0] if per_split else None)
    return list(train[0]) if train else []
