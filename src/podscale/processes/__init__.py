"""Many processes as one run: schedulers, the process group, heartbeat, watchdog, stragglers, launch."""
