"""Estimates from arithmetic alone: no devices, no processes. `dispatch`: what a token dispatcher moves, and how
long."""
