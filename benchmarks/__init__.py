"""Sources of every published figure: ``python -m benchmarks.<name>`` writes ``benchmarks/results/<name>.json``."""
