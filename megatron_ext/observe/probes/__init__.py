"""The probes: each hooks one kind of module and adds to the store's sums."""

from megatron_ext.observe.probes.base import Probe, Run
from megatron_ext.observe.probes.bias import BiasProbe
from megatron_ext.observe.probes.counts import CountProbe
from megatron_ext.observe.probes.flips import FlipProbe
from megatron_ext.observe.probes.load import LoadProbe
from megatron_ext.observe.probes.logits import LogitProbe
from megatron_ext.observe.probes.norms import NormProbe
from megatron_ext.observe.probes.shared import LatentProbe, SharedProbe
from megatron_ext.observe.probes.weights import WeightProbe

# In a fixed order, equal on all ranks: a probe's place is its index among the failures in the store.
PROBES: tuple[type[Probe], ...] = (
    CountProbe,
    LoadProbe,
    WeightProbe,
    LogitProbe,
    FlipProbe,
    NormProbe,
    SharedProbe,
    LatentProbe,
    BiasProbe,
)

__all__ = ["PROBES", "Probe", "Run"]
