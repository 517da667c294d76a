"""*How* bytes are moved. This layer takes flat tensors and knows no parameters."""
