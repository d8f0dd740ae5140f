"""The version: upstream's release, then ours."""

__version__ = "0.19.2+moe.0"
