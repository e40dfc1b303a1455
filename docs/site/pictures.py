"""Take the pictures of the site that docs/site.md shows, from the committed records.

    python docs/site/pictures.py

Needs chromium and playwright (the test group); writes the pictures beside this file.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from quant_bench.site import write_site

HERE = Path(__file__).parent
WIDE, PHONE = {"width": 1400, "height": 800}, {"width": 390, "height": 844}
# name, pattern of the page, viewport, colours, what must be at the top of the view (None: the page itself)
VIEWS = (
    ("leaderboard-light", "index.html", WIDE, "light", None),
    ("leaderboard-dark", "index.html", WIDE, "dark", None),
    ("leaderboard-phone", "index.html", PHONE, "light", None),
    ("model-light", "models/smollm2*.html", WIDE | {"height": 900}, "light", "#outliers"),
    ("model-phone", "models/smollm2*.html", PHONE, "light", None),
    ("pareto-light", "pareto.html", WIDE, "light", None),
    ("arm-light", "arms/sink-logit*.html", WIDE, "light", None),
)
# the question that has a record of every recipe
SWEEP = "token_perplexity", "limit=40"


def sweep(page: Any) -> None:
    """The figure of quality by bits, a series for each recipe."""
    figure = page.locator("#figure-sweep")
    options = figure.locator("select").first
    names = options.evaluate("select => [...select.options].map((option) => option.text)")
    options.select_option(index=next(i for i, name in enumerate(names) if all(part in name for part in SWEEP)))
    page.wait_for_timeout(1000)
    figure.screenshot(path=HERE / "sweep-light.png")


def main() -> None:
    """Take all pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        site = write_site(HERE.parent.parent / "results", Path(folder) / "site").index.parent
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, pattern, viewport, colors, top in VIEWS:
            page = browser.new_page(viewport=viewport, color_scheme=colors)
            page.goto(next(site.glob(pattern)).as_uri())
            # plots are drawn when they come into view
            page.wait_for_timeout(1500)
            if top is not None:
                page.locator(top).evaluate("element => element.scrollIntoView()")
                page.wait_for_timeout(1500)
            page.screenshot(path=HERE / f"{name}.png")
            if name == "model-light":
                sweep(page)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
