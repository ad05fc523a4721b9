"""Caches of targets that give tokens back: what each kind of layer has to keep for that."""
