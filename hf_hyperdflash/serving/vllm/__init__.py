"""vLLM's plugin."""
