"""Profile a compiled step: its time, bytes and FLOPs by kind of work."""
