"""The command line's groups of commands, one a file."""
