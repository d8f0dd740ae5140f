"""Metrics and alarms from routing maps, logits and expert outputs (docs/architecture.md)."""
