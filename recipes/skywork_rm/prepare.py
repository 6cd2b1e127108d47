"""Skywork's preferences (Skywork-Reward-Preference-80K-v0.2) as pairs: data/skywork_rm/{train,test}.jsonl.

    python -m recipes.skywork_rm.prepare

The dataset has one split. Every 40th pair is held out for tests.
"""

from recipes.hub import arguments, download, write
from recipes.ultrafeedback.prepare import rows_of

TEST_EVERY = 40


def main(argv=None):
    options = arguments(__doc__, "Skywork/Skywork-Reward-Preference-80K-v0.2", "data/skywork_rm").parse_args(argv)
    pairs = list(rows_of(download(options.dataset, "train")))
    write(options.folder / "train.jsonl", (pair for number, pair in enumerate(pairs) if number % TEST_EVERY))
    write(options.folder / "test.jsonl", pairs[::TEST_EVERY])


if __name__ == "__main__":
    main()
