"""Budget: where the time of a compiled step goes on the device, by kind of work, beside what the machine could do."""
