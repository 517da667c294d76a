"""*Where* bytes lie, decided once, as plain data. Nothing here uses streams, process groups or modules."""
