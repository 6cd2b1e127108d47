"""TinyZero's Countdown (Jiayi-Pan/Countdown-Tasks-3to4) as rows of a prompt and extra_info: data/countdown/*.jsonl.

python -m recipes.countdown.prepare
"""

from recipes.hub import arguments, download, need_columns, write

NUM_TEST = 1024
"""rows at the end of the dataset that are held out"""
QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /), and each number has to be used once. Think first, then write the expression alone in <answer> "
    "</answer> tags, for example <answer>(1 + 2) / 3</answer>."
)


def rows_of(table):
    need_columns(table, "nums", "target")
    for row in table:
        content = QUESTION.format(numbers=row["nums"], target=row["target"])
        extra_info = {"numbers": row["nums"], "target": row["target"]}
        yield {"messages": [{"role": "user", "content": content}], "extra_info": extra_info}


def main(argv=None):
    options = arguments(__doc__, "Jiayi-Pan/Countdown-Tasks-3to4", "data/countdown").parse_args(argv)
    rows = list(rows_of(download(options.dataset, "train")))
    held_out = min(NUM_TEST, len(rows) // 10)
    write(options.folder / "train.jsonl", rows[: len(rows) - held_out])
    write(options.folder / "test.jsonl", rows[len(rows) - held_out :])


if __name__ == "__main__":
    main()
