"""*When* something happens: pure decisions. Imports no torch."""
