"""What a run leaves behind: its folder, events, journal and ledger."""
