"""What users call. Everything is validated first; then the model changes, and nothing can be refused any more."""
