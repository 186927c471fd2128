"""What is put in the way of the Python that has verifiers; nothing here is imported by ours."""
