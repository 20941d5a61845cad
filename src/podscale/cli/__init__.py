"""The command line: `main` runs a command, `parser` defines them, `commands` carries them out."""
