"""Hugging Face models: loading, packed forward, heads, the renderer, tiny models."""
