"""Settings of the site of the documentation (`make docs`): Sphinx, with MyST, reads the pages as GitHub shows them.

Links lead to pages and headings as there, those to other files of the tree to copies of them. Each page stands in
NAVIGATION, else the build fails.
"""

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

from proxy import __version__

NAVIGATION = {
    "Begin": ["docs/getting-started", "docs/installation", "docs/migration"],
    "Configure": ["docs/configuration", "docs/authentication", "docs/targets", "docs/session-lifetime", "docs/http"],
    "Operate": ["docs/systemd", "docs/monitoring", "docs/metrics", "docs/upgrade", "docs/troubleshooting"],
    "Kubernetes": [
        "docs/kubernetes",
        "The chart's values <deploy/helm/pulsar-trio-proxy/README>",
        "docs/images",
        "docs/kubernetes-tests",
    ],
    "Secure": ["docs/security", "SECURITY"],
    "Analytics": [
        "docs/analytics",
        "docs/analytics-receiver",
        "docs/analytics-source",
        "docs/analytics-tables",
        "docs/analytics-benchmarks",
    ],
    "Understand": ["ARCHITECTURE", "docs/design/*", "docs/conformance", "docs/benchmarks"],
    "Project": ["CHANGELOG", "CONTRIBUTING"],
}
"""Heading in the site's menu → pages of the tree below it, in this order."""

project = "pulsar-trio-proxy"
html_title = f"{project} {__version__}"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "deploy/helm/pulsar-trio-proxy/README.md"]
extensions = ["myst_parser"]
myst_heading_anchors = 6
html_theme = "furo"
html_copy_source = False
html_use_index = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Add the menu to the first page. Diagrams are lists of arrows, readable as they are: no program draws them."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", _add_menu)


def _add_menu(_app: Sphinx, page: str, text: list[str]) -> None:
    if page == root_doc:
        for heading, pages in NAVIGATION.items():
            text[0] += "\n".join(["\n```{toctree}", ":hidden:", ":glob:", f":caption: {heading}", "", *pages, "```\n"])
