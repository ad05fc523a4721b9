"""Plugins that run this package's drafters in serving engines."""
