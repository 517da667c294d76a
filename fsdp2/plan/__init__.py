"""*Where* bytes lie, decided once: plain data. No stream, no process group, no module."""
