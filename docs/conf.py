"""Sphinx configuration."""

from __future__ import annotations

import headrace

project = "headrace"
author = "the headrace engineers"
release = headrace.__version__
extensions = ["sphinx.ext.napoleon", "myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = "headrace"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
