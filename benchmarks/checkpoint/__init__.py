"""Files in and out, streams to engines, and moves to other ranks."""
