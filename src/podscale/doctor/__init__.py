"""What this machine can do, and what will hold a run back: `podscale doctor`."""
