"""The figures of a report: functions from a run to an Altair chart.

Importing their modules needs the packages of the extra ``report``.
"""
