"""What a step holds and reserves."""
