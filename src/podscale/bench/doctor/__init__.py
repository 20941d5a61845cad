"""What this machine can do, and what holds it back."""
