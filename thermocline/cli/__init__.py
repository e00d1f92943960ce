"""The command line: `main` dispatches to `commands`; the other files are what commands share."""
