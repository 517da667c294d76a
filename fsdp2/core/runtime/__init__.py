"""Turns hooks into events, and events into actions. Owns what is in flight under one root."""
