"""The report of a run: read its folder, sum it up, write a page that can be handed on."""

from headrace.report.headline import summary_text
from headrace.report.page import write_report
from headrace.report.run_reader import read_run

__all__ = ["read_run", "summary_text", "write_report"]
