"""The report of a run: read its folder, sum it up, write a page that can be handed on."""

from headrace.report.page import write_report
from headrace.report.run_folder import read_run
from headrace.report.summary import summary_text

__all__ = ["read_run", "summary_text", "write_report"]
