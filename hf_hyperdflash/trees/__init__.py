"""Draft trees: the value, its layout for a forward, how it grows, which nodes are accepted. Torch alone."""
