"""What a run writes: its folder, events, journal and ledger."""
