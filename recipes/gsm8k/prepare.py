"""GSM8K (openai/gsm8k) as rows of messages and an answer: data/gsm8k/{train,test}.jsonl.

python -m recipes.gsm8k.prepare
"""

from recipes.hub import arguments, download, need_columns, write

INSTRUCTION = 'Let\'s think step by step, and write the final answer after "####".'


def rows_of(table):
    """Rows with the question as messages, and GSM8K's own solution, which ends with `#### 42`."""
    need_columns(table, "question", "answer")
    for row in table:
        content = f"{row['question']} {INSTRUCTION}"
        yield {"messages": [{"role": "user", "content": content}], "answer": row["answer"]}


def main(argv=None):
    options = arguments(__doc__, "openai/gsm8k", "data/gsm8k").parse_args(argv)
    for split in ("train", "test"):
        write(options.folder / f"{split}.jsonl", rows_of(download(options.dataset, split, subset="main")))


if __name__ == "__main__":
    main()
