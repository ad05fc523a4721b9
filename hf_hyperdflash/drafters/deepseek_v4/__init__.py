"""DeepSeek-V4's own drafters, from its checkpoints: MTP and DSpark."""
