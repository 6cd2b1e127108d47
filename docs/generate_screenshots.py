"""Write the pictures of `docs/viewer.md`: pages of a run that `tests/recorded_run.py` writes, in headless Chromium.

python -m docs.generate_screenshots                 the pictures of the docs
python -m docs.generate_screenshots --all FOLDER    every page, light and dark, at each width, to look at
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from tests.browser.chromium import Browser, browser
from tests.recorded_run import Shape, write_chain, write_run
from tests.view_server import serving

FOLDER = Path(__file__).with_name("viewer")
WIDTHS = (1280, 700, 400)
HEIGHT = 800
COLORS = 256
FIRST = Shape(steps=40, groups=16, samples=12, thoughts=8)
SECOND = Shape(steps=32, groups=16, samples=12, thoughts=8, seed=3)
PICTURES = {
    "overview": ("light", "overview?smooth=0.6"),
    "rollouts": ("light", "rollouts?step=9"),
    "tokens": ("light", "sample?step=9&group=129&sample=2&tab=tokens&by=difference"),
    "sample-dark": ("dark", "sample?step=9&group=129&sample=2"),
    "compare": ("light", "compare?item=countdown-0"),
    "timeline": ("light", "timeline"),
    "ledger": ("light", "ledger"),
}
OF_TWO = ("compare",)
"""pictures of two runs"""
PLACES = {
    **{name: place for name, (_, place) in PICTURES.items()},
    "overview-of-two": "overview",
    "siblings": "sample?step=9&group=129&sample=2&tab=siblings",
}


@contextmanager
def servers() -> Iterator[tuple[Browser, str, str]]:
    """A browser, and the addresses of a run and of two runs."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [write_run(Path(folder) / "lr-1e-6", FIRST), write_run(Path(folder) / "lr-3e-6", SECOND, 3e-6)]
        write_chain(runs[0], FIRST, ended=FIRST.steps)
        write_chain(runs[1], SECOND, 3e-6, ended=SECOND.steps, error="WorkerDied")
        with browser() as chromium, serving([str(runs[0])]) as one, serving([str(run) for run in runs]) as two:
            yield chromium, one, two
            assert not chromium.errors, chromium.errors


def take(chromium: Browser, address: str, theme: Any, width: int, is_whole: bool = False) -> Image.Image:
    """Return the picture of a place."""
    page = chromium.page(color_scheme=theme)
    page.set_viewport_size({"width": width, "height": HEIGHT})
    page.goto(address)
    chromium.wait_until_shown(page, f"#{address.partition('#')[2]}")
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=is_whole))).convert("RGB")
    page.context.close()
    return picture.quantize(COLORS, kmeans=8 if not is_whole else 0, dither=Image.Dither.NONE)


def main(argv: list[str]) -> None:
    with servers() as (chromium, one, two):
        if argv[:1] == ["--all"]:
            folder = Path(argv[1])
            folder.mkdir(parents=True, exist_ok=True)
            for name, place in PLACES.items():
                url = two if name in (*OF_TWO, "overview-of-two") else one
                for theme in ("light", "dark"):
                    for width in WIDTHS:
                        picture = take(chromium, f"{url}#/{place}", theme, width, is_whole=True)
                        picture.save(folder / f"{name}-{theme}-{width}.png")
            return
        FOLDER.mkdir(exist_ok=True)
        for name, (theme, place) in PICTURES.items():
            picture = take(chromium, f"{two if name in OF_TWO else one}#/{place}", theme, WIDTHS[0])
            picture.save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
