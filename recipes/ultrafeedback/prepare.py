"""UltraFeedback (HuggingFaceH4/ultrafeedback_binarized) as preference pairs: data/ultrafeedback/{train,test}.jsonl.

    python -m recipes.ultrafeedback.prepare

`chosen` and `rejected` of the dataset are whole conversations. Their common beginning becomes `messages`, the last
turns become the two answers. Pairs of equal answers are left out.
"""

from recipes.hub import arguments, download, need_columns, write


def pair_of(row):
    """A row for `rlite dpo` and `rlite rm`; None if the two conversations are no pair of answers."""
    *prompt, chosen = row["chosen"]
    *other_prompt, rejected = row["rejected"]
    is_pair = prompt and prompt == other_prompt and chosen["role"] == rejected["role"] == "assistant"
    if not is_pair or chosen["content"] == rejected["content"]:
        return None
    return {"messages": prompt, "chosen": chosen["content"], "rejected": rejected["content"]}


def rows_of(table):
    need_columns(table, "chosen", "rejected")
    return filter(None, map(pair_of, table))


def main(argv=None):
    options = arguments(__doc__, "HuggingFaceH4/ultrafeedback_binarized", "data/ultrafeedback").parse_args(argv)
    for name in ("train", "test"):
        write(options.folder / f"{name}.jsonl", rows_of(download(options.dataset, f"{name}_prefs")))


if __name__ == "__main__":
    main()
