"""What users call. Each call validates everything first. Then it changes the model, and can no longer refuse."""
