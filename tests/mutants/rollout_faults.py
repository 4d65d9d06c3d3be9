"""Faults of rollouts: what engines are sent, who gets which completion, who sleeps when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn

from lightrft.engines.protocol import Completion, Engine, Request, Sampling
from lightrft.errors import EngineError
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.record import StrategyRecord
from mutants.mutant import Mutant, Planted, altered


def with_engine(strategy: StrategyRecord, change: Callable[[Engine], Engine]) -> StrategyRecord:
    """Whatever engine the strategy is given, it gets another made of it."""

    def setup_inference_engine(args: object, engine_type: Any = "vllm", actor: Any = None) -> Any:
        return strategy.setup_inference_engine(args, change(engine_type), actor)

    return evolve(strategy, setup_inference_engine=setup_inference_engine)


def sent(strategy: StrategyRecord, change: Callable[[list[tuple[str, Tensor]]], Any]) -> StrategyRecord:
    """The engine is sent what ``change`` makes of the weights."""

    def changed(engine: Engine) -> Engine:
        def update_weights(named_tensors: Iterable[tuple[str, Tensor]]) -> None:
            engine.update_weights(change(list(named_tensors)))

        return altered(engine, update_weights=update_weights)

    return with_engine(strategy, changed)


def last_bucket_lost(strategy: StrategyRecord) -> StrategyRecord:
    return sent(strategy, lambda pairs: pairs[:-1])


def tied_head_sent_twice(strategy: StrategyRecord) -> StrategyRecord:
    def change(pairs: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return pairs + [("lm_head.weight", tensor) for name, tensor in pairs if name == "model.embed_tokens.weight"]

    return sent(strategy, change)


def wrapper_names_sent(strategy: StrategyRecord) -> StrategyRecord:
    return sent(strategy, lambda pairs: [(f"module.{name}", tensor) for name, tensor in pairs])


def sent_in_bf16(strategy: StrategyRecord) -> StrategyRecord:
    return sent(strategy, lambda pairs: [(name, tensor.bfloat16().to(tensor.dtype)) for name, tensor in pairs])


def merging_drifts(strategy: StrategyRecord) -> StrategyRecord:
    def update_engine_weights(actor: nn.Module) -> None:
        strategy.update_engine_weights(actor)
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if "base_layer" in name:
                    parameter.add_(1e-6)

    return evolve(strategy, update_engine_weights=update_engine_weights)


def cache_of_old_weights_kept(strategy: StrategyRecord) -> StrategyRecord:
    return with_engine(strategy, lambda engine: altered(engine, flush_cache=lambda: None))


def old_weights_kept(strategy: StrategyRecord) -> StrategyRecord:
    seen: list[bool] = []

    def update_engine_weights(actor: nn.Module) -> None:
        if not seen:
            strategy.update_engine_weights(actor)
        seen.append(True)

    return evolve(strategy, update_engine_weights=update_engine_weights)


def generated(strategy: StrategyRecord, change: Callable[[list[Completion], Sampling], Any]) -> StrategyRecord:
    """``gather_and_generate`` gives what ``change`` makes of the completions."""

    def gather_and_generate(sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        return change(strategy.gather_and_generate(sampling_params, *args, **kwargs), sampling_params)

    return evolve(strategy, gather_and_generate=gather_and_generate)


def completions_backwards(strategy: StrategyRecord) -> StrategyRecord:
    return generated(strategy, lambda completions, sampling: completions[::-1])


def n_ignored(strategy: StrategyRecord) -> StrategyRecord:
    return generated(strategy, lambda completions, sampling: completions[:: sampling.n])


def n_applied_twice(strategy: StrategyRecord) -> StrategyRecord:
    return generated(strategy, lambda all_, sampling: [one for one in all_ for _ in range(sampling.n)])


def samples_not_adjacent(strategy: StrategyRecord) -> StrategyRecord:
    def change(completions: list[Completion], sampling: Sampling) -> list[Completion]:
        return [one for sample in range(sampling.n) for one in completions[sample :: sampling.n]]

    return generated(strategy, change)


def equal_prompts_collapsed(strategy: StrategyRecord) -> StrategyRecord:
    def gather_and_generate(sampling_params: Any, all_prompt_token_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        once = list({tuple(prompt): prompt for prompt in all_prompt_token_ids or []}.values())
        return strategy.gather_and_generate(sampling_params, once, *args, **kwargs)

    return evolve(strategy, gather_and_generate=gather_and_generate)


def completions_of_the_next_rank(strategy: StrategyRecord) -> StrategyRecord:
    def change(completions: list[Completion], sampling: Sampling) -> Any:
        everyones: list[Any] = [None] * strategy.world_size
        dist.all_gather_object(everyones, completions)
        return everyones[(strategy.get_rank() + 1) % strategy.world_size]

    return generated(strategy, change)


def places_counted_on_each_rank(strategy: StrategyRecord) -> StrategyRecord:
    """Every rank's prompts begin at place 0, so that two ranks draw the same."""

    def gather_and_generate(sampling_params: Any, all_prompt_token_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        return strategy.engine_generate_local(sampling_params, all_prompt_token_ids) if all_prompt_token_ids else []

    return evolve(strategy, gather_and_generate=gather_and_generate)


def an_error_stays_where_it_was(strategy: StrategyRecord) -> StrategyRecord:
    def gather_and_generate(sampling_params: Any, all_prompt_token_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return strategy.gather_and_generate(sampling_params, all_prompt_token_ids, *args, **kwargs)
        except EngineError as error:
            if "failed elsewhere" in str(error):
                return []
            raise

    return evolve(strategy, gather_and_generate=gather_and_generate)


def a_failed_update_stays_where_it_was(strategy: StrategyRecord) -> StrategyRecord:
    def update_engine_weights(actor: nn.Module) -> None:
        try:
            strategy.update_engine_weights(actor)
        except EngineError as error:
            if "failed elsewhere" not in str(error):
                raise

    return evolve(strategy, update_engine_weights=update_engine_weights)


def bad_prompts_left_out(strategy: StrategyRecord) -> StrategyRecord:
    def gather_and_generate(sampling_params: Any, all_prompt_token_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        good = [prompt for prompt in all_prompt_token_ids or [] if prompt]
        return strategy.gather_and_generate(sampling_params, good, *args, **kwargs)

    return evolve(strategy, gather_and_generate=gather_and_generate)


def ids_before_media(strategy: StrategyRecord) -> StrategyRecord:
    def engine_generate_local(
        sampling_params: Any, prompt_token_ids: Any = None, multi_modal_inputs: Any = None
    ) -> Any:
        inputs = None if prompt_token_ids is not None else multi_modal_inputs
        return strategy.engine_generate_local(sampling_params, prompt_token_ids, inputs)

    return evolve(strategy, engine_generate_local=engine_generate_local)


def engines_of_one_rank(config: StrategyConfig) -> StrategyConfig:
    return evolve(config, engine_tp_size=1)


def sleeps_as_often_as_asked(strategy: StrategyRecord) -> StrategyRecord:
    engines: list[Engine] = []

    def kept(engine: Engine) -> Engine:
        engines.append(engine)
        return engine

    def maybe_sleep_inference_engine() -> None:
        strategy.maybe_sleep_inference_engine()
        if engines and engines[-1].capabilities.sleep:
            engines[-1].sleep()

    return evolve(with_engine(strategy, kept), maybe_sleep_inference_engine=maybe_sleep_inference_engine)


def sleeps_behind_the_back(strategy: StrategyRecord) -> StrategyRecord:
    """The engine is put to sleep and nobody remembers it."""
    engines: list[Engine] = []

    def kept(engine: Engine) -> Engine:
        engines.append(engine)
        return engine

    def maybe_sleep_inference_engine() -> None:
        if engines and engines[-1].capabilities.sleep:
            engines[-1].sleep()

    return evolve(with_engine(strategy, kept), maybe_sleep_inference_engine=maybe_sleep_inference_engine)


def update_leaves_it_asleep(strategy: StrategyRecord) -> StrategyRecord:
    def changed(engine: Engine) -> Engine:
        def wake_up(*, weights_only: bool = False) -> None:
            if not weights_only:
                engine.wake_up()

        return altered(engine, wake_up=wake_up)

    return with_engine(strategy, changed)


def never_sleeps(strategy: StrategyRecord) -> StrategyRecord:
    return evolve(strategy, maybe_sleep_inference_engine=lambda: None)


def always_sleeps_after_a_rollout(strategy: StrategyRecord) -> StrategyRecord:
    def change(completions: list[Completion], sampling: Sampling) -> list[Completion]:
        strategy.maybe_sleep_inference_engine()
        return completions

    return generated(strategy, change)


def asks_sleep_of_what_cannot(strategy: StrategyRecord) -> StrategyRecord:
    return with_engine(strategy, lambda engine: altered(engine, capabilities=evolve(engine.capabilities, sleep=True)))


def asked(strategy: StrategyRecord, change: Callable[[Request], Request]) -> StrategyRecord:
    """The engine is asked what ``change`` makes of each request."""

    def changed(engine: Engine) -> Engine:
        def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            return engine.generate([change(request) for request in requests], sampling)

        return altered(engine, generate=generate)

    return with_engine(strategy, changed)


def placeholders_expanded_twice(strategy: StrategyRecord) -> StrategyRecord:
    def twice(request: Request) -> Request:
        expanded = [again for token in request.prompt_token_ids for again in [token] * (2 if token == 99 else 1)]
        return evolve(request, prompt_token_ids=expanded) if request.images else request

    return asked(strategy, twice)


def images_shift_by_a_row(strategy: StrategyRecord) -> StrategyRecord:
    """Rows without an image are left out of the list before it is dealt out."""

    def gather_and_generate(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("all_images")
        if isinstance(given, list) and kwargs.get("images_num") is None:
            full = [images for images in given if images]
            kwargs["all_images"] = full + [None] * (len(given) - len(full))
        return strategy.gather_and_generate(*args, **kwargs)

    return evolve(strategy, gather_and_generate=gather_and_generate)


def images_dropped(strategy: StrategyRecord) -> StrategyRecord:
    return asked(strategy, lambda request: evolve(request, images=()))


def null_engine_raises(strategy: StrategyRecord) -> StrategyRecord:
    def gather_and_generate(*args: Any, **kwargs: Any) -> Any:
        raise Planted("there is no engine")

    return evolve(strategy, gather_and_generate=gather_and_generate)


def null_engine_gives_none(strategy: StrategyRecord) -> StrategyRecord:
    def gather_and_generate(sampling_params: Any, all_prompt_token_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        return [None for _ in all_prompt_token_ids or []]

    return evolve(strategy, gather_and_generate=gather_and_generate)


R1, R4 = "R1 FC36", "R4 FC12"
MUTANTS = (
    Mutant("last-bucket-lost", "the last weight is not sent", "R2: a failed", last_bucket_lost, "local"),
    Mutant("tied-head-sent-twice", "a tied weight is sent under both names", "R2: a failed", tied_head_sent_twice, "local"),
    Mutant("FC32-wrapper-names-sent", "names carry those of wrappers", "R2 FC32", wrapper_names_sent, "local"),
    Mutant("sent-in-bf16", "weights are rounded to bfloat16 on the way", "R2 FC32", sent_in_bf16, "local"),
    Mutant("FC33-merging-drifts", "each update moves what is trained a little", "R2 FC32", merging_drifts, "local"),
    Mutant("FC11-cache-of-old-weights-kept", "the engine's cache outlives an update", "R2 FC11",
           cache_of_old_weights_kept, "local"),
    Mutant("old-weights-kept", "updates after the first are not sent", "R2 FC11", old_weights_kept, "local"),
    Mutant("completions-backwards", "completions come in the reverse order", R1, completions_backwards, "local"),
    Mutant("FC37-n-ignored", "one completion for each prompt, whatever n", R1, n_ignored, "local"),
    Mutant("FC37-n-applied-twice", "n * n completions for each prompt", R1, n_applied_twice, "local"),
    Mutant("samples-not-adjacent", "the n of a prompt are not adjacent", R1, samples_not_adjacent, "local"),
    Mutant("FC36-equal-prompts-collapsed", "equal prompts get one completion", R1, equal_prompts_collapsed, "local"),
    Mutant("completions-of-the-next-rank", "each rank gets the completions of the next", R1,
           completions_of_the_next_rank, "fsdp", 2),
    Mutant("FC42-places-counted-on-each-rank", "all ranks draw from the same seeds", R1, places_counted_on_each_rank,
           "fsdp", 2),
    Mutant("an-error-stays-where-it-was", "a bad prompt is an error on its own rank alone", "R5: a bad",
           an_error_stays_where_it_was, "fsdp", 2),
    Mutant("bad-prompts-left-out", "an empty prompt is left out in silence", "R5: a bad", bad_prompts_left_out, "local"),
    Mutant("ids-before-media", "of both kinds of input one is ignored", "R5: exactly", ids_before_media, "local"),
    Mutant("a-failed-update-stays-where-it-was", "an update that failed on one rank is none on the others",
           "R2: a failed", a_failed_update_stays_where_it_was, "fsdp", 2),
    Mutant("engines-of-one-rank", "engine_tp_size is not carried out", "C7", base="local", configure=engines_of_one_rank),
    Mutant("FC35-sleeps-as-often-as-asked", "two sleeps reach the engine", R4, sleeps_as_often_as_asked, "local"),
    Mutant("FC35-generates-asleep", "a sleeping engine is asked to generate", R4, sleeps_behind_the_back, "local"),
    Mutant("FC12-updates-asleep", "a sleeping engine is sent weights", R4, update_leaves_it_asleep, "local"),
    Mutant("never-sleeps", "the engine is never put to sleep", R4, never_sleeps, "local"),
    Mutant("always-sleeps-after-a-rollout", "a rollout ends with sleep though it is switched off", "R4: sleeps after",
           always_sleeps_after_a_rollout, "local"),
    Mutant("asks-sleep-of-what-cannot", "an engine that cannot sleep is told to", "R4: sleeps after",
           asks_sleep_of_what_cannot, "local"),
    Mutant("FC13-placeholders-expanded-twice", "a placeholder is expanded before the engine does", "R6",
           placeholders_expanded_twice, "local"),
    Mutant("FC39-images-shift-by-a-row", "a row without images gets the next row's", "R6", images_shift_by_a_row, "local"),
    Mutant("images-dropped", "the engine reads the text alone", "R6", images_dropped, "local"),
    Mutant("null-engine-raises", "without an engine generating is an error", "F1", null_engine_raises),
    Mutant("null-engine-gives-none", "without an engine completions are None", "F1", null_engine_gives_none),
)  # fmt: skip
