"""Hooks become events, events become actions. Owns what is in flight under one root."""
