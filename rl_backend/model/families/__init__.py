"""Built-in families, each a reader of ``config.json``; importing a file registers its families."""
