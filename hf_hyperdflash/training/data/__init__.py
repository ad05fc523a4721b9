"""Rows of chat data as supervised tokens, and the blocks that are laid over them."""
