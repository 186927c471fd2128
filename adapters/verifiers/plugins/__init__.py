"""Modules put on the path of the Python that has verifiers; nothing here is imported by ours."""
