"""Optimizers for shards, and clipping."""
