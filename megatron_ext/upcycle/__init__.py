"""Start an MoE from a dense model, or a larger MoE from a smaller one: files in, files out."""
