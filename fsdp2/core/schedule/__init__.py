"""Decides *when* something happens. Pure decisions, without torch."""
