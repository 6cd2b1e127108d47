"""Write the pictures of `docs/viewer.md`: pages of a run that `tests/recorded_run.py` writes, in headless Chromium.

python -m docs.generate_screenshots
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser.chromium import browser
from tests.recorded_run import Shape, write_run
from tests.view_server import serving

FOLDER = Path(__file__).with_name("viewer")
SIZE = {"width": 1280, "height": 800}
COLORS = 256
FIRST = Shape(steps=40, groups=16, samples=12, thoughts=8)
SECOND = Shape(steps=32, groups=16, samples=12, thoughts=8, seed=3)
PICTURES = {
    "overview": ("light", "overview"),
    "rollouts": ("light", "rollouts?step=9"),
    "tokens": ("light", "sample?step=9&group=129&sample=2&tab=tokens&by=difference"),
    "sample-dark": ("dark", "sample?step=9&group=129&sample=2"),
    "compare": ("light", "compare?item=countdown-0"),
    "timeline": ("light", "timeline"),
    "ledger": ("light", "ledger"),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = [write_run(Path(folder) / "lr-1e-6", FIRST), write_run(Path(folder) / "lr-3e-6", SECOND, 3e-6)]
        with browser() as chromium, serving([str(runs[0])]) as one, serving([str(run) for run in runs]) as two:
            for name, (theme, place) in PICTURES.items():
                url = two if name == "compare" else one
                page = chromium.page(color_scheme=theme)
                page.set_viewport_size(SIZE)  # type: ignore[arg-type]
                page.goto(f"{url}#/{place}")
                chromium.wait_until_shown(page, f"#/{place}")
                page.wait_for_timeout(500)
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                palette = picture.quantize(COLORS, kmeans=8, dither=Image.Dither.NONE)
                palette.save(FOLDER / f"{name}.png", optimize=True)
                page.context.close()
        assert not chromium.errors, chromium.errors


if __name__ == "__main__":
    main()
