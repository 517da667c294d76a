"""The functions that users call. Each call validates everything before it changes the model, and then cannot refuse."""
