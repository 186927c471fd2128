"""Where every published figure comes from: ``python -m benchmarks.<name>`` writes ``benchmarks/results/<name>.json``."""
