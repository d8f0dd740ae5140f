"""What is installed here: which Megatron with which patches, whether its files are intact, and the examples."""

from megatron_ext.install.about import about_lines, about_record
from megatron_ext.install.proof import Proof, other_megatron, prove_distribution, prove_megatron

__all__ = ["Proof", "about_lines", "about_record", "other_megatron", "prove_distribution", "prove_megatron"]
