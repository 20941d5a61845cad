"""Who hears of a training: journal, terminal, trackers, report."""
