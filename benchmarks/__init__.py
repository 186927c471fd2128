"""Sources of published figures: ``python -m benchmarks.<name>`` writes ``benchmarks/results/<name>.json``.

A result without a script here is the record of a finished study. Its ``commit`` names the tree that has the script.
"""
