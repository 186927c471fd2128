"""Options of configurations: declared, read from a command line and files, shown in help. Imports neither Ray nor torch."""
