"""What every backend means by every operation, numbered: the text of docs/laws.md, which is generated from here."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

INTRODUCTION = """
What every backend means by every operation. They are the text behind the conformance suite: a law's number is the name of its
test, and a report names laws. W = number of ranks, m = micro_train_batch_size, B = train_batch_size, A = accumulated_gradient
= B / (m * W). "Reference" = the `local` backend on the same global data in one process. FC and a number: a fault seen in other
people's software, which the law would have found.
"""


@frozen
class Section:
    """Statements about one part of the surface."""

    letter: str
    title: str
    statements: Mapping[str, str]
    """By number."""


SECTIONS: tuple[Section, ...] = (
    Section(
        "C",
        "Configuration",
        {
            "C1": """
            `StrategyConfig.from_args` takes an `argparse.Namespace`, any mapping, any object with attributes, or a
            `StrategyConfig`; equal content gives an equal config. The input is never changed.
            """,
            "C2": """
            Every field of the reference's `StrategyConfig` exists with its default (table at the end). A value is
            structured to the field's type when nothing is lost ("8" -> 8, "1e-5" -> 1e-5, "false"/"False"/"no"/"0"
            -> False, list -> tuple for `adam_betas`, "None"/None for optional fields); otherwise `ConfigError`. One
            error lists every bad field with its value and what is accepted: 8.5 or "8.5" for an int, "maybe" for a
            bool, NaN or infinity or a negative learning rate, zero_stage 4, engine_type "tgi", betas of length 3 or
            outside [0, 1).
            """,
            "C3": """
            Names that are no field land in `extra_args`; `get_extra_arg(name, default)` reads them, and one that
            looks like a misspelt field (`train_batchsize`) warns once with the nearest name. Nothing is dropped.
            """,
            "C4": """
            A config is frozen, hashable, shares no mutable state with another; structure(unstructure(c)) == c, also
            by way of JSON and TOML.
            """,
            "C5": """
            B % (m * W) != 0 is a `ConfigError` that names the three numbers and the nearest B that fits; raised on
            every rank before any collective.
            """,
            "C6": """
            `print_config_summary()` shows each group of fields, and which were overridden, on rank 0 only.
            """,
            "C7": """
            No field is silently ignored: one that the chosen backend or engine does not carry out (nor the trainer,
            for the trainer's fields), set to other than its default, is an `UnsupportedOperation` that names field,
            value and backend (say `sp_size=2`, or `zpg=2` on fsdp), at `get_strategy`.
            """,
        },
    ),
    Section(
        "W",
        "World",
        {
            "W1": """
            With no launcher variables set: one rank, no process group, no CUDA needed, no network opened. `import
            lightrft` loads neither torch nor any engine.
            """,
            "W2": """
            torchrun, Slurm and explicit arguments are understood; a half-set environment (RANK without WORLD_SIZE),
            a port in use, a peer that never comes: a clear error within `timeout`.
            """,
            "W3": """
            `setup_distributed` may be called again and changes nothing. `close()` leaves no process group, child
            process, port or temporary file; a second `close()` is harmless; a strategy whose process group someone
            else made leaves it alone.
            """,
            "W4": """
            Same seed, same start: parameters made under `init_model_context` are equal on all ranks. Dropout
            differs between ranks and repeats between runs.
            """,
            "W5": """
            `setup_dataloader` gives each rank its part of the same order: every sample once per epoch (with
            `drop_last` the incomplete batch excepted), in an order that depends on seed and epoch, another one in
            each epoch, and not on the number of ranks; `consumed_samples` begins in the middle.
            """,
        },
    ),
    Section(
        "T",
        "Training",
        {
            "T1": """
            After A pairs of `backward(mean loss of m samples)`, the gradient is that of the mean loss over the B
            samples of all ranks. The scaling is the backend's business: the caller never divides.
            """,
            "T2": """
            `optimizer_step` applies on each A-th call per optimizer (`name` only labels logs: two models under the
            default name do not share a count) and otherwise changes no parameter, no optimizer state and no
            scheduler. Two models (actor, critic) in one strategy count, clip and step independently, whatever the
            order in which their optimizers were made or stepped.
            """,
            "T3": """
            Clipping is by the global 2-norm over all parameters of that model on all ranks, before the step;
            `grad_norm` is the norm before clipping; `max_norm` 0 means none. Equal to
            `torch.nn.utils.clip_grad_norm_` on the reference.
            """,
            "T4": """
            A non-finite norm on any rank: all ranks skip that update together, parameters and optimizer state are
            bitwise unchanged, gradients are cleared, the scheduler does not advance, the outcome says so.
            """,
            "T5": """
            The scheduler advances once for each applied update.
            """,
            "T6": """
            Parity: same start, same global batches, at least 5 AdamW updates with clipping, fp32: final parameters
            within 1e-6 of the reference for an MLP and 5e-5 for a two-layer Qwen2, for every backend and ZeRO
            stage, W in {1, 2}, m in {1, 2}; so also W = 1 equals W = 2.
            """,
            "T7": """
            A window cut short (`optimizer_step(..., flush=True)`) is the mean over the micro-batches that it has. One
            that has none is not ended: nothing is applied, and the window after it is a whole one.
            """,
            "T8": """
            Token-mean losses: `token_mean_scale(strategy, tokens_in_window)` is the factor by which a summed loss
            is multiplied so that, after `backward` of each micro-batch, the gradient is that of the global mean
            over tokens, ragged or not.
            """,
            "T9": """
            `create_optimizer`: AdamW; biases, norms and other parameters of fewer than 2 dimensions get no weight
            decay; each trainable parameter is in one group exactly once (tied ones too); frozen ones in none;
            unknown keywords are an error.
            """,
            "T10": """
            `bf16`: forward and backward in bfloat16, master weights and optimizer state in fp32: a thousand
            updates, each far below bf16's resolution, are not lost. Gradients are reduced in fp32.
            """,
            "T11": """
            `prepare` returns what it was given in the same order and arity (one in, one out); `None` stays `None`;
            eval models get no optimizer and no gradients; a model that is already sharded or an engine is not
            wrapped a second time. One order of calls serves every backend: make the optimizer (and scheduler) on
            the plain model, then `prepare((model, optimizer))` or `prepare((model, optimizer, scheduler))`;
            sharding re-points the optimizer's groups and the scheduler follows. The other order (prepare the model,
            then make its optimizer) works wherever the library beneath allows it, else it says so.
            """,
            "T12": """
            `unwrap_model` gives the user's module, through actor wrappers and engines; `moving_average` is beta *
            ema + (1 - beta) * parameter once per applied update, also when parameters are sharded. Loading a
            checkpoint is no update and hides none that comes after it.
            """,
            "T13": """
            `backward` says what is wrong with a loss before anything is sent: not a scalar, without a graph, of
            another model.
            """,
        },
    ),
    Section(
        "G",
        "Collectives",
        {
            "G1": """
            `all_reduce` of tensors, Python numbers and nested dicts of them keeps structure, dtype, shape and
            device, never changes its input, and is exact for integers up to 2**63 under sum and max. The mean of
            integers is a float. An unknown `op` is a `ValueError` before anything is sent. Empty dict in, empty
            dict out.
            """,
            "G2": """
            `all_gather` gives a list with one entry per rank in rank order (a dict gives a dict of lists); shapes
            may differ between ranks; scalars, empty tensors, bool and bfloat16 work. Under W = 1 it is `[data]`, as
            existing fakes have it.
            """,
            "G3": """
            `all_reduce(x, "sum")` == sum of `all_gather(x)`; mean == sum / W; reduce of gather and gather of reduce
            agree; linear in x; the same on every rank.
            """,
            "G4": """
            With `checked(strategy)`, ranks that call different operations, or the same with different keys, dtypes
            or ops, all get an error that says which rank called what, instead of hanging.
            """,
            "G5": """
            `broadcast` gives every rank what rank `src` has, of the same kinds as `all_reduce`, and changes no
            input.
            """,
            "G6": """
            `weighted_mean(strategy, total, count)` is the sum of all totals over the sum of all counts, NaN where
            nothing was counted.
            """,
        },
    ),
    Section(
        "K",
        "Checkpoints",
        {
            "K1": """
            save then load into a fresh model restores parameters, buffers, optimizer, scheduler, step counters, RNG
            and `client_state` bitwise, at the same W. `client_state` of ints, floats, strings, lists, dicts and
            tensors round-trips.
            """,
            "K2": """
            Train k, save, load in a new process, train k == train 2k, bitwise at the same W.
            """,
            "K3": """
            Saved at one W, loaded at another; saved by one of local, fsdp, deepspeed, loaded by another: same
            parameters and same optimizer moments (within 1e-6), for model weights always, for optimizer state
            wherever the manifest says so.
            """,
            "K4": """
            A save is atomic: killed (SIGKILL) at any moment, the directory still holds the previous checkpoints
            whole, `latest` names a whole one, and the next save cleans the debris. A full disk is an error that
            leaves the old ones.
            """,
            "K5": """
            Rotation runs after the new checkpoint is committed; it keeps the `max_num` most recently committed and
            never the one just written nor the one in `latest` goes; `max_mem` (GB, 10**9 bytes) bounds the rest;
            `max_num` <= 0 means keep all; directories that are not ours are never touched; a stale higher step
            number from an older run is older.
            """,
            "K6": """
            `load_ckpt` without a tag takes `latest`, falling back to the newest whole one; missing, damaged
            (checksum) or foreign: `CheckpointError` naming path and reason, and the model is untouched.
            """,
            "K7": """
            `load_module_strict` reports missing and unexpected keys by name; `load_module_only` touches nothing
            else.
            """,
            "K8": """
            Tied weights are stored once and tied again on load; frozen and non-persistent ones as torch does.
            """,
            "K9": """
            Files are loaded without unpickling code (safetensors, `weights_only=True`, JSON); a `tag` or key that
            would leave the directory ("../x", absolute, NUL) is refused.
            """,
            "K10": """
            `save_model` writes a Hugging Face directory that `AutoModelForCausalLM.from_pretrained` loads with
            equal logits, from any backend, PEFT adapters included.
            """,
        },
    ),
    Section(
        "M",
        "Memory",
        {
            "M1": """
            `offload_model`, `reload_model`, `maybe_offload_optimizer` and `maybe_load_optimizer` change where
            tensors are and no number, also before the first step; what needs something that is offloaded says what
            to call first.
            """,
        },
    ),
    Section(
        "R",
        "Rollouts",
        {
            "R1": """
            `gather_and_generate` returns, on each rank, the completions of that rank's own prompts in their own
            order, whatever each rank's count (0 included) and whatever the engine's tensor-parallel size; n samples
            per prompt stay adjacent.
            """,
            "R2": """
            After `update_engine_weights(actor)` the engine's log-probabilities of any sequence equal the actor's
            within 1e-4 (fp32); no cache of the old weights survives; tied, wrapped (`module.`, `_orig_mod.`, PEFT)
            and vision-language names map.
            """,
            "R3": """
            Weight sync streams in buckets of bounded bytes: peak extra memory <= 2 buckets + the largest tensor,
            never a second whole model; the last, partial bucket is sent; bf16 training into an fp32 engine and back
            casts once.
            """,
            "R4": """
            Sleep and wake are idempotent; generating or updating while asleep wakes first; sleep after a failed
            generate still works; an engine that cannot sleep (vLLM on CPU) says so once and goes on.
            """,
            "R5": """
            Exactly one of `prompt_token_ids` and `multi_modal_inputs`: both or neither is a `ValueError`. An empty
            prompt, a prompt longer than the model's limit, token ids outside the vocabulary: an error that names
            the index.
            """,
            "R6": """
            Multimodal: images and videos arrive nested per prompt or flat with counts; counts that do not add up
            are a `ValueError` with the numbers; a prompt without images loses its image placeholders, one with
            images keeps them, unexpanded.
            """,
            "R7": """
            Greedy decoding gives equal tokens on hf, vllm and sglang for the same weights (fp32, tiny model);
            sampling with a seed repeats; `stop`, `max_new_tokens`, `n`, `top_p`, `top_k`, `temperature`, `logprobs`
            mean the same on each.
            """,
            "R8": """
            Every `Completion` has `prompt_token_ids`, `output_token_ids`, `logprobs` (or None), `finish_reason`.
            """,
            "R9": """
            Length statistics (count, mean, p50, p80, max, truncated share) over all ranks every `plot_every` steps;
            histograms to TensorBoard and PNG when a log directory is set.
            """,
        },
    ),
    Section(
        "F",
        "The fake",
        {
            "F1": """
            `FakeStrategy(seed=42, max_norm=1.0, micro_train_batch_size=1, train_batch_size=128, args=None)` and
            `get_fake_strategy(args=None)`; rank 0 of 1; `setup_distributed`, `init_model_context`, sleep, wake and
            `update_engine_weights` do nothing; `prepare` returns what it got, unchanged (identity);
            `setup_inference_engine` returns None; `engine_generate_local` and `gather_and_generate` return `[]`;
            the optimizer offload and load return the same object; `all_reduce` gives the data's own values (a copy,
            G1); `all_gather` wraps it in a list; `save_ckpt` / `load_ckpt` use standard PyTorch state and return
            `(path, client_state)`.
            """,
            "F2": """
            It obeys C, W, T, G, K and S as the rest do, T10 excepted (it leaves the model's precision alone), and R
            as soon as it is given an engine (`get_fake_strategy(args, engine=scripted(...))`): a trainer that
            passes on the fake passes on `local`.
            """,
        },
    ),
    Section(
        "S",
        "Surface",
        {
            "S1": """
            Every backend's record satisfies `Strategy` under mypy and pyright; so does a third party's, or the
            error names the member.
            """,
            "S2": """
            What a backend cannot do raises `UnsupportedOperation` naming backend, operation and what to do instead.
            """,
            "S3": """
            Positional order, keyword names and defaults equal the table's (checked by `inspect` against a table); a
            mutable `{}` default becomes None, and so does one that would call CUDA.
            """,
            "S4": """
            To build a strategy prints nothing, leaves no process behind after `close()`, sets no environment
            variable and changes nothing that it was given.
            """,
            "S5": """
            Whatever the order in which operations are called, what can be seen after each is what a plain model of
            them says.
            """,
            "S6": """
            Two backends that run the same program, at whatever numbers of ranks, see the same after each operation:
            numbers within 1e-6, all else exactly.
            """,
        },
    ),
)
