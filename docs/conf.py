"""Sphinx's settings for `make docs`.

The source folder is the repository's root, so that links between README, docs/ and benchmarks/ are the same on a code
host and in the built pages.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import streampack  # noqa: E402

project = "streampack"
author = "The streampack authors"
release = streampack.__version__
project_copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**.md", "benchmarks/README.md",
    "benchmarks/results/*.md",
]  # fmt: skip
exclude_patterns = [".*", "build", "dist", "outputs", "tests", "wheels", "**/__pycache__", "*.egg-info"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # pages of results go from their title to any level

# A name in single backticks in a docstring is linked where it names something on the page of the API.
default_role = "py:obj"
autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autoclass_content = "class"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

nitpicky = True
# Names of other projects have no page here, nor have those of ours that are not public.
nitpick_ignore_regex = [("py:.*", r".*")]

html_theme = "furo"
html_title = f"streampack {release}"
html_static_path = ["_static"]
html_css_files = ["streampack.css"]
html_js_files = ["streampack.js"]
html_extra_path = ["_extra"]  # index.html, which leads to docs/index.html
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "footer_icons": [],
    "light_css_variables": {"font-stack": "system-ui, sans-serif", "color-brand-primary": "#1d5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb4ea"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
