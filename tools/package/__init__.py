"""The wheel and the sdist: how pip and uv build them (PEP 517)."""
