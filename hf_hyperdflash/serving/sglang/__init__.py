"""SGLang's plugin."""
