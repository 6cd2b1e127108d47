"""Training on rows put together: who observes a trainer, its plan, and its command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import rlite
from rlite.algorithms import OnLogprobs
from rlite.assembly.launch import main as main
from rlite.assembly.launch import serve_if_worker, session_of
from rlite.assembly.observers import TemplateFile, run_observers
from rlite.assembly.plans import data_plan, model_plan
from rlite.assembly.proof.chained import HashChain
from rlite.data.chat.ends import LearntEnds
from rlite.data.chat.template import CLOCK, check_template_options, with_template
from rlite.data.readers.formats import RowKind
from rlite.data.readers.streaming import StreamedTable
from rlite.data.rows import Rows, converted, described, read_source
from rlite.data.source import Source
from rlite.data.tokens import TokenRows, mixed
from rlite.evaluation.record import EvaluationRecord
from rlite.nn.pretrained import end_ids, load_tokenizer
from rlite.services.console.mfu import Repeated, UsageReport
from rlite.trainer.held_out import HeldOutOptions, held_out_sources
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.program_objects import IN_MEMORY, NOTHING, ProgramObjects
from rlite.trainer.run.resume import started_at
from rlite.trainer.supervised_options import DataOptions, SupervisedConfig
from rlite.wording import counted


def make_observers(trainer: Any, repeated: Repeated, record: EvaluationRecord | None = None) -> list[Observer]:
    """Return the observers of a trainer's run, after its engine is built."""
    own = run_observers(trainer.run, trainer.reported, trainer.name, trainer.plan)
    return [
        UsageReport(trainer.engine, repeated),
        *filter(None, [record]),
        *own,
        TemplateFile(trainer.options.data.chat_template_path),
        HashChain(trainer, trainer.run),
    ]


def make_plan(trainer: Any) -> dict[str, str]:
    """Return how a step's work is divided, as text by topic."""
    session, dims, model, run = rlite.current_session(), trainer.engine.dims, trainer.model, trainer.options.trainer
    lengths, num_items, stream = trainer.rows.lengths, trainer.options.data.batch_size, trainer.rows.stream
    if stream is None or stream.is_whole:
        num_items = min(num_items, len(trainer.rows))
    data_ranks = counted(dims.num_data_ranks, "data rank")
    form = f"{trainer.rows.form}; " if trainer.rows.form else ""
    if stream is not None:
        form = f"{stream}; {form}at the beginning "
    batch_tokens = num_items * trainer.rows.rows_per_item * lengths.mean()
    return {
        **model_plan(model.model_name, trainer.engine, model.max_grad_norm),
        **trainer.engine.choices(),
        "loss": trainer.describe_loss(),
        "devices": f"{len(session.devices)} x {session.device}, launcher {session.launcher.kind} = {dims}",
        "data": f"{form}{len(trainer.rows)} items of {lengths.mean():.0f} tokens on average, at most {lengths.max()}; "
        f"{trainer.rows.tally}",
        **_learnt(trainer),
        **data_plan(trainer.options.data),
        **({} if trainer.rows.ends is None else trainer.rows.ends.describe(trainer.engine.module.further_end_ids)),
        "step": f"{num_items} items, about {batch_tokens:.0f} tokens over {data_ranks}, in packs of at most "
        f"{model.max_length_per_device * dims.pack_factor} tokens",
        "run": f"{trainer.loader} = {trainer.run.total_steps}, checkpoint every {run.save_freq}, in {run.save_dir}",
        **trainer.evaluation_plan(),
    }


def _learnt(trainer: Any) -> dict[str, str]:
    """Return how many tokens are learnt, by topic; nothing if the loss reads whole rows."""
    if not isinstance(trainer.loss, OnLogprobs):
        return {}
    rows = trainer.rows
    told = f"{rows.loss_mask.sum():,} of {rows.loss_mask.size:,} tokens ({rows.loss_mask.mean():.1%})"
    which = "--group 0" if rows.rows_per_item == 1 else "--microbatch 0"
    place = f"; rlite replay {shlex.quote(str(trainer.options.trainer.save_dir))} --step 1 {which} shows rows of them"
    data = trainer.options.data
    has_files = data.path not in (None, IN_MEMORY) or data.mixture
    return {"learnt": f"{told}{'' if rows.stream is None else ' at the beginning'}{place if has_files else ''}"}


def train(cls: type[Any], options: SupervisedConfig, given: ProgramObjects = NOTHING) -> dict[str, float]:
    """Train in the program's session, or in one of its own.

    Args:
        cls: a class of trainers.
        options: the trainer's config.
        given: objects of a program, in place of what the options name.

    Returns:
        The metrics of the last step.
    """
    serve_if_worker(options)
    with CLOCK.fixed(started_at(options)):
        model_name = getattr(options, cls.key).model_name
        rows, test_rows = read_tokens(options.data, options.test_data, model_name, cls.tokenise, cls.kind, given)
        further = cls.read_further(options, given)
        with session_of(options):
            return dict(cls(options, rows, test_rows, given.callbacks, **further).fit())


def read_tokens(
    data: DataOptions,
    test_data: Mapping[str, HeldOutOptions],
    model_name: str,
    tokenise: Callable[..., TokenRows],
    kind: RowKind,
    given: ProgramObjects = NOTHING,
) -> tuple[TokenRows, dict[str, TokenRows]]:
    """Return the token rows of the data, and of each set to evaluate on.

    `given`: rows of a program, in place of those of the paths.
    """
    tokenizer = with_template(load_tokenizer(model_name), data.chat_template_path, "data.chat_template_path")
    ends, test_ends = (LearntEnds(tokenizer, end_ids(model_name), data.end_token) for _ in range(2))
    check_template_options(tokenizer, data.chat_template_options, "data.chat_template_options")
    turns = {"last_turn_only": True} if data.last_turn_only else {}
    template_options = {**data.chat_template_options, **turns, "escape_special_tokens": data.escape_special_tokens}

    def tokens_of(table: Rows, source: Source, ends: LearntEnds, limit: int | None = None) -> TokenRows:
        made = tokenise(table.rows[:limit], tokenizer, data.max_length, source.where, ends=ends, **template_options)
        return replace(made, form=described(table, tokenizer))

    def tokens(source: Source, ends: LearntEnds, limit: int | None = None) -> TokenRows:
        return tokens_of(read_source(given.source(source), kind), source, ends, limit)

    sources = data.sources("data")
    if data.streaming:
        own = given.source(sources[""])
        stream = StreamedTable(own, lambda rows: tokens_of(converted(rows, own, kind), own, ends), data.shuffle_buffer)
        rows = replace(stream.first, stream=stream)
    else:
        parts = {name: tokens(source, ends) for name, source in sources.items()}
        rows = mixed(parts, data.weights) if data.mixture else parts[""]
    ends.is_settled = True
    sets = {name: each for name, each in test_data.items() if not each.is_generated}
    tests = held_out_sources(sets, data.columns, data.system_prompt, data.map)
    test_rows = {name: tokens(source, test_ends, test_data[name].limit) for name, source in tests.items()}
    return replace(rows, ends=ends), test_rows
