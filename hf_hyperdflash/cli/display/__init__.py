"""Displays a generation: its text by who wrote it, and its draft trees. For notebooks, web pages and terminals."""
