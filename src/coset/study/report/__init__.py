"""The report of a finished study: one page, tables and figures, all computed from ``results.json``."""

from coset.study.report.writing import write_report

__all__ = ["write_report"]
