r"""MATH (EleutherAI/hendrycks_math) as rows of messages and an answer: data/math/{train,test}.jsonl.

    python -m recipes.math.prepare

The answer is the content of the last \boxed{...} of the dataset's solution.
"""

from recipes.hub import arguments, download, need_columns, write

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
INSTRUCTION = r"Let's think step by step, and put the final answer in \boxed{}."


def last_boxed(solution):
    r"""The content of the last \boxed{...}, with its inner braces; None without one."""
    _, mark, rest = solution.rpartition(r"\boxed{")
    depth = 1
    for place, character in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place]
    return None


def rows_of(table):
    need_columns(table, "problem", "solution")
    for row in table:
        if answer := last_boxed(row["solution"]):
            content = f"{row['problem']} {INSTRUCTION}"
            yield {"messages": [{"role": "user", "content": content}], "answer": rf"\boxed{{{answer}}}"}


def main(argv=None):
    options = arguments(__doc__, "EleutherAI/hendrycks_math", "data/math").parse_args(argv)
    for split in ("train", "test"):
        tables = [download(options.dataset, split, subset=subject) for subject in SUBJECTS]
        write(options.folder / f"{split}.jsonl", (row for table in tables for row in rows_of(table)))


if __name__ == "__main__":
    main()
