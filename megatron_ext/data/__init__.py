"""Text to Megatron's indexed files: tokenize, describe in a manifest, check before training."""

from megatron_ext.data.check import CheckReport, check, verify_for_training
from megatron_ext.data.flags import add_arguments
from megatron_ext.data.manifest import Manifest, Shard, TokenizerRecord, labels_by_prefix, load_manifest

__all__ = [
    "CheckReport",
    "Manifest",
    "Shard",
    "TokenizerRecord",
    "add_arguments",
    "check",
    "labels_by_prefix",
    "load_manifest",
    "verify_for_training",
]
