"""The columns *train* and *serve* of an earlier commit, with the configs of today's `benchmarks/released.py`.

    PYTHONPATH=CHECKOUT python benchmarks/architecture_columns_earlier.py --out FOLDER TYPE...

`benchmarks.architectures --earlier CHECKOUT` runs it. `rlite`, `tests` and `benchmarks` are those of the checkout. Its
own check and comparisons decide. Only the configs come from the folder of this file.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import released  # of this file's folder
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks import architectures as earlier
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.models.architecture import alone, miniature, saved
from tests import forked_python
from tests.integration.worlds import world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("types", nargs="+", help="model types")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        forked_python.prepare(Path(folder))
        stack.enter_context(world(args.devices))
        released.compare(args.out, args.types, args.devices, verdicts_of)


def verdicts_of(name: str, make: released.Maker) -> dict[str, Any]:
    """Return the verdicts of one config."""
    try:
        config = make()
        model = miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
        expected = alone(model).detach()
    except Exception as error:
        return dict.fromkeys(("train", "serve"), (earlier.NOT_BUILT, str(error)))
    with saved(model) as folder:
        byte_tokenizer().save_pretrained(folder)
        return {
            "train": earlier.verdict(lambda: earlier.train_error(folder, expected) + earlier.gradient_error(model)),
            "serve": earlier.verdict(lambda: earlier.served_error(folder, model)),
        }


if __name__ == "__main__":
    main()
