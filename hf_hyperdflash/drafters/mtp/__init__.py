"""The multi-token-prediction heads that targets carry in their own checkpoints."""
