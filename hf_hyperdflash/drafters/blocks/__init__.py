"""Drafters of blocks: HyperDFlash, with DFlash and DSpark as two of its shapes."""
