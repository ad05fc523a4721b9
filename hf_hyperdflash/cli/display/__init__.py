"""To look at what a generation did: its text by who wrote it, its draft trees. For notebooks, web pages, terminals."""
