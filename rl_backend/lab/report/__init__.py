"""The report of a run: one HTML file, made from the files of its folder."""

from rl_backend.lab.report.page import FILE_NAME, write_report

__all__ = ["FILE_NAME", "write_report"]
