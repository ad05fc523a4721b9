"""What pays: how much to draft where the request says "auto"."""
