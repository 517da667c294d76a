"""Ranks of one host that read each other's memory, in the place of gloo's messages."""
