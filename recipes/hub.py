"""Common code of the prepare scripts: a dataset of the Hugging Face hub, and rows as JSON lines."""

import argparse
import json
import sys
from pathlib import Path

try:
    import datasets
except ImportError:
    sys.exit("recipes need the package datasets: pip install 'rlite[data]'")


def arguments(description, dataset, folder):
    """The options of a prepare script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default=dataset, help=f"hub name, or a folder of a copy; default: {dataset}")
    parser.add_argument("--folder", type=Path, default=Path(folder), help=f"where rows are written; default: {folder}")
    return parser


def download(dataset, split, subset=None):
    """The rows of a split. A folder has no subsets."""
    name = None if Path(dataset).is_dir() else subset
    try:
        return datasets.load_dataset(dataset, name, split=split)
    except (OSError, ValueError) as error:
        sys.exit(
            f"cannot load the split {split!r} of {dataset}: {error}\n"
            "The script downloads from the Hugging Face hub. On a machine without a network, copy the dataset there "
            "and give its folder: --dataset FOLDER"
        )


def need_columns(table, *names):
    """End with a message if the dataset has other columns."""
    missing = [name for name in names if name not in table.column_names]
    if missing:
        sys.exit(f"the dataset has no column {', '.join(missing)}; it has {', '.join(table.column_names)}")


def write(path, rows):
    """Write rows as JSON lines, and say how many."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines)} rows")
