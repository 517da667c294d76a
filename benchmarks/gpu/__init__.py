"""What one GPU says: values, step time, memory and copies."""
