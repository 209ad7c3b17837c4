"""What is added to the documentation while it is built; MkDocs calls these functions."""

from __future__ import annotations

from functools import cache

import mathematics
import reference_pages
from command_line_page import command_line_page
from figures import figures, with_figures
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from quality_plots import quality_plots
from results_pages import RESULTS, load_results, results_page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the list of all modules into the navigation."""
    _fill(config.nav)
    return config


def _fill(entries: list[object]) -> None:
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        for title, value in entry.items():
            if value == "GENERATED":
                entry[title] = reference_pages.navigation()
            elif isinstance(value, list):
                _fill(value)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the plots that stand beside the results."""
    for part in reference_pages.FOLDERS:
        for module in reference_pages.modules(part):
            content = reference_pages.module_page(module)
            files.append(File.generated(config, reference_pages.page_path(module), content=content))
    files.append(File.generated(config, "reference/index.md", content=reference_pages.public_names_page()))
    files.append(File.generated(config, "command-line.md", content=command_line_page()))
    files.append(File.generated(config, "results.md", content=results_page()))
    for plot in sorted(RESULTS.glob("*.svg")):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    for name, svg in quality_plots(load_results()["quality.json"]).items():
        files.append(File.generated(config, f"assets/{name}", content=svg))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in figures from the measured results."""
    return with_figures(markdown, _known_figures())


@cache
def _known_figures() -> dict[str, str]:
    return figures()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML."""
    return mathematics.with_mathml(html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name what the theme leaves without a name, for screen readers."""
    dialog = '<div class="md-search" data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
