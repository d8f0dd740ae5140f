"""The alarms: one rule a file, a history they share, and the board that says what stands."""

from megatron_ext.observe.alarms.blind import BlindLoss
from megatron_ext.observe.alarms.board import Board
from megatron_ext.observe.alarms.collapse import RoutingCollapse
from megatron_ext.observe.alarms.dead import DeadExpert
from megatron_ext.observe.alarms.drift import LogitDrift
from megatron_ext.observe.alarms.gate import FlatGate, SharpGate
from megatron_ext.observe.alarms.history import History
from megatron_ext.observe.alarms.loss import LossSpike
from megatron_ext.observe.alarms.overload import OverloadedRank
from megatron_ext.observe.alarms.rogue import RogueExpert
from megatron_ext.observe.alarms.rule import Finding, Rule
from megatron_ext.observe.alarms.slow import SlowStep

RULES: tuple[type[Rule], ...] = (
    RoutingCollapse,
    DeadExpert,
    RogueExpert,
    FlatGate,
    SharpGate,
    LogitDrift,
    LossSpike,
    OverloadedRank,
    SlowStep,
    BlindLoss,
)

__all__ = ["RULES", "Board", "Finding", "History", "Rule"]
