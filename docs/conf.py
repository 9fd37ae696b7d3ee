"""Settings of the documentation site: Sphinx, furo, MyST. ``launch/docs.sh`` builds it."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import method_pages  # noqa: E402
import nav  # noqa: E402
from sphinx.ext.autodoc.mock import undecorate  # noqa: E402

import hvdcompress  # noqa: E402

project = "hvdcompress"
copyright = "the hvdcompress developers"
version = release = hvdcompress.__version__
extensions = ["myst_parser", "sphinx_design", "sphinx_copybutton", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["templates", "*_notes.md"]
source_suffix = {".md": "markdown"}
suppress_warnings = ["myst.header"]  # pages are one heading and its parts; generated ones may skip a level

html_theme = "furo"
html_title = "hvdcompress"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": False}
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_enable_extensions = ["colon_fence"]
smartquotes_action = "qe"  # no dashes of --options
myst_heading_anchors = 3
myst_links_external_new_tab = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# The reference is read from the docstrings; no framework is needed for that.
FRAMEWORKS = "torch horovod tensorflow keras tf_keras mpi4py triton lightning accelerate transformers"
autodoc_mock_imports = FRAMEWORKS.split()
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
default_role = "code"


METHOD_FILE = re.compile(r"\]\((?:\.\./)+hvdcompress/methods/(\w+)\.py\)")


def setup(app):  # noqa: D103
    app.connect("builder-inited", lambda app: method_pages.write())
    app.connect("source-read", _prepare)
    app.connect("autodoc-before-process-signature", _undecorate)


def _undecorate(app, documented, is_bound):
    """Show the signature of a constructor that a function of a mocked framework decorates."""
    if isinstance(documented, type) and "__init__" in vars(documented):
        documented.__init__ = undecorate(documented.__init__)


def _prepare(app, page, source):
    """Link to the page of a method instead of its file, and add the navigation of nav.py."""
    if not page.startswith("methods/"):
        up = posixpath.relpath("methods", posixpath.dirname(page) or ".")
        source[0] = METHOD_FILE.sub(rf"]({up}/\1.md)", source[0])
    source[0] += "\n\n" + nav.toctree(page) + "\n"
