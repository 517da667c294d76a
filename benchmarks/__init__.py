"""Scripts that measure, in rooms by subject; what they share is here."""
