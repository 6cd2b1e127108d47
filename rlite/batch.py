"""The table of batch keys: what each key of a batch holds, who writes it, and who reads it.

A batch is a TensorDict whose first dimension is N rows, one per sequence. Keys per token are [N, L], right-padded to
the longest row. Losses read packs: `rlite.data.packs.lazy_pack` lays n rows end to end, so that [N, L] becomes [T], all
tokens of the pack, and [N] becomes [n]. A ragged key [N, M] holds several values per token, end to end, and another key
counts them; in a pack it is [K], without padding. Workflows and programs may add keys of their own, which are padded,
split over ranks and packed like the keys of this table.

A batch passes through the phases of a trainer, each of which returns a new batch with more keys (`with_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """One row of the table."""

    name: str
    shape: str
    """[N, L] per token, [N] per row, [T] per packed token, [N, M] several per token"""
    dtype: str
    writer: str
    readers: str
    meaning: str
    padding: int = 0
    """value of the positions beyond a row's end"""
    counts: str = ""
    """key [N, L] with the number of a ragged key's values for each token"""


_TABLE = (
    Key("input_ids", "[N, L]", "int64", "workflow, data", "models", "Tokens of the prompt and of all that follows."),
    Key("attention_mask", "[N, L]", "bool", "workflow, data", "packing", "Ones on tokens, zeros on padding."),
    Key("loss_mask", "[N, L]", "bool", "workflow, data", "losses, advantages", "Tokens to train on: the model's own."),
    Key("logprobs", "[N, L]", "float32", "workflow", "policy losses", "Log-probability at sampling; 0 on the prompt."),
    Key("versions", "[N, L]", "int64", "workflow", "collector", "Policy version of the token; -1 on the prompt.", -1),
    Key("kept_counts", "[N, L]", "int32", "workflow", "heads", "Number of the token's `kept_ids`; 0 is all ids."),
    Key("kept_ids", "[N, M]", "int32", "workflow", "heads", "Ids among which tokens were sampled.", -1, "kept_counts"),
    Key("routed_experts", "[N, L, B]", "uint8", "workflow, trainer", "actor", "Experts that layers chose.", 255),
    Key("truncated", "[N]", "bool", "workflow", "metrics", "Whether a length limit ended the row."),
    Key("rewards", "[N] or [N, L]", "float32", "workflow", "advantages, metrics", "Reward of the row's trajectory."),
    Key("token_rewards", "[N, L]", "float32", "workflow", "advantages", "Rewards of turns, in place of `rewards`."),
    Key("reward/NAME", "[N]", "float32", "workflow", "metrics", "Part NAME of the reward; NaN if it did not count."),
    Key("scores", "[N]", "float32", "workflow", "metrics", "Score of the trajectory, by which it is evaluated."),
    Key("num_turns", "[N]", "int64", "workflow", "metrics", "Turns of the model in the trajectory."),
    Key("turn_limited", "[N]", "float32", "workflow", "metrics", "1 if `max_turns` ended the episode, 0 if not."),
    Key("num_tool_calls", "[N]", "float32", "workflow", "metrics", "Tool calls in the trajectory."),
    Key("num_tool_errors", "[N]", "float32", "workflow", "metrics", "Tool calls in the trajectory that failed."),
    Key("sequence_index", "[N]", "int64", "workflow", "advantages, metrics", "Row number within its trajectory."),
    Key("seat_ids", "[N]", "int64", "workflow", "advantages", "Seat of the row's trajectory; see SeatsWorkflow."),
    Key("sampler_row", "[N]", "int64", "workflow", "sampler", "Number of the row's prompt in the training data."),
    Key("group_ids", "[N]", "int64", "collector", "advantages, metrics", "Number of the row's group."),
    Key("ref_logprobs", "[N, L]", "float32", "reference", "losses, advantages", "Log-probability by the reference."),
    Key("teacher", "[N, L]", "int16", "teacher", "losses", "Teacher that judges the following token; -1 is none."),
    Key(
        "teacher_hidden", "[N, L, H]", "as computed", "teacher", "student's head", "Last hidden states of the teacher."
    ),
    Key("teacher_logprobs", "[N, L] or [N, L, K]", "float32", "teacher", "losses", "Log-probabilities by the teacher."),
    Key(
        "teacher_ids", "[N, L, K]", "int32", "teacher", "losses", "Ids whose `teacher_logprobs` are there; -1 is none."
    ),
    Key("teacher_view", "[N, L]", "int32", "teacher", "packing", "Number of the context that the teacher was shown."),
    Key("row_key", "[N]", "int64", "trainer", "teacher", "Hash of the row of the training data, for its context."),
    Key("values", "[N, L]", "float32", "critic", "advantages, value loss", "Value of the state before the token."),
    Key("old_logprobs", "[N, L]", "float32", "trainer", "losses, advantages", "Log-probability before the update."),
    Key("full_old_logprobs", "[N, L]", "float32", "trainer", "advantages", "`old_logprobs` over the vocabulary."),
    Key("trained_logprobs", "[N, L]", "float32", "trainer", "record", "Log-probability in the token's own update."),
    Key("entropies", "[N, L]", "float32", "trainer", "record", "Entropy where the token is predicted, in its update."),
    Key("is_skipped", "[N]", "bool", "trainer", "record", "Whether the row's update was not made."),
    Key("advantages", "[N, L]", "float32", "advantages", "policy losses", "Advantage of the token; 0 off `loss_mask`."),
    Key("returns", "[N, L]", "float32", "advantages", "value loss", "Value that the critic should have predicted."),
    Key("selected", "[N, L]", "bool", "selection", "policy losses", "Tokens that the policy loss treats differently."),
    Key("token_type_ids", "[N, L]", "int64", "rewards", "encoders", "Which of two texts the token is a part of."),
    Key("pair_ids", "[N]", "int64", "data", "packing", "Number of the pair; rows of one pair share a pack."),
    Key("is_chosen", "[N]", "bool", "data", "preference losses", "Whether the row is the preferred one of its pair."),
    Key("margin", "[N]", "float32", "data", "reward-model loss", "Least difference of the scores of a pair."),
    Key("is_desirable", "[N]", "bool", "data", "KTO's loss", "Whether the row's answer is one to learn."),
    Key("reference_point", "[N]", "float32", "trainer", "KTO's loss", "Reward / beta of an average answer; one value."),
    Key("cu_seqlens", "[n + 1]", "int32", "packing", "models, losses", "Where rows begin and end in the pack."),
    Key("position_ids", "[T]", "int64", "packing", "models", "Position of the token in its row."),
    Key("max_seqlen", "number", "int", "packing", "models", "Length of the pack's longest row."),
    Key("prefix_tree", "object", "PrefixTree", "packing", "models", "Tokens that rows share; absent without any."),
)
KEYS: Mapping[str, Key] = {key.name: key for key in _TABLE}

NAMED_REWARD = "reward/"
"""prefix of the keys that hold parts of a reward"""
PER_TOKEN = frozenset(key.name for key in _TABLE if key.shape == "[N, L]" and "workflow" in key.writer)
"""keys of trajectories that have one entry per token"""
INTEGER = frozenset(key.name for key in _TABLE if key.name in PER_TOKEN and key.dtype.startswith("int"))
"""keys of trajectories that hold integers per token"""
RAGGED: Mapping[str, str] = {key.name: key.counts for key in _TABLE if key.counts}
"""ragged keys, with the keys that count their values. A trajectory without them has no value for any token"""
PACK_LAYOUT = frozenset(key.name for key in _TABLE if key.writer == "packing")
"""keys that describe a pack"""
