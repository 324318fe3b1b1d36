"""The manual: `make docs` builds it from these pages, the docstrings and the stored results, without a network."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import seqkern  # noqa: E402

project, version = "seqkern", seqkern.__version__
release = version
language = "en"
smartquotes_action = "D"  # dashes; quotes stay as they are written
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "extension"]

# Pages are Markdown as GitHub shows it: links to headings are made as GitHub makes them.
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Docstrings: single backticks are code, sections are Google's, types stand in the signatures.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False  # else each of several names would have a copy of their text
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path, html_css_files = ["static"], ["manual.css"]
html_title = f"seqkern {version}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style, pygments_dark_style = "friendly", "monokai"
