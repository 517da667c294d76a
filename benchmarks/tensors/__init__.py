"""Formats of parameters, and of what all-gathers send."""
