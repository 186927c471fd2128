"""The report of a run: one HTML file, made from the files of its folder."""
