"""Makes the site look like the repository, so that one relative link works on GitHub and in the site.

mkdocs takes pages from docs/ alone. Here they get the paths that they have in the repository, the pages elsewhere join
them, and so does every file that a page links to.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ELSEWHERE = ("*.md", "benchmarks/*.md", "schedules/*.md", "examples/**/*.md", "titan_integration/**/*.md", "tests/*.md")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def on_config(config: Any) -> None:
    """The public addresses, if there are any."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url, config.site_url = urls.get("Repository"), urls.get("Documentation")


def on_files(files: Files, config: Any) -> Files:
    """Every file of docs/ by its path in the repository, and the pages and files from elsewhere."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = [path for pattern in ("docs/*.md", *ELSEWHERE) for path in ROOT.glob(pattern)]
    linked = {target for page in pages for target in _linked(page) if target.is_file()}
    own = [
        File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        for path in sorted({*pages, *linked, ROOT / "docs/site.css"})
    ]
    return Files([*theme, *own])


def on_page_content(html: str, page: Any, **others: Any) -> None:
    """Refuse an example that is no code: a line that begins with `>>>` becomes a quotation."""
    if "<blockquote>" in html and page.file.src_uri == "docs/api.md":
        shown = html.split("<blockquote>", 1)[1][:200]
        raise PluginError(f"{page.file.src_uri} has a quotation, surely an example that is not indented: {shown}")


def _linked(page: Path) -> set[Path]:
    """Files of this repository that a page links to, or shows as pictures."""
    targets = (Path(os.path.normpath(page.parent / target)) for target in _LINK.findall(page.read_text()))
    return {target for target in targets if target.is_relative_to(ROOT)}
