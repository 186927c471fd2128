"""verl's engines on this package's runtimes."""
