"""``oomrun report``: a run as one HTML file, made of its journal alone.

Covers: the page, its charts and what they show. Pure: events in, text out. Does not
cover: reading the journal and writing the file (``oomrun.cli.report_command``).
"""

from oomrun.report.page import render

__all__ = ["render"]
