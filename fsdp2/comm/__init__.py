"""*How* bytes travel: flat tensors in, bytes moved. Sees no parameter."""
