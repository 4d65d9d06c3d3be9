"""Teaches a small random language model to write digits: rollouts, a reward, and REINFORCE with a group baseline.

pip install 'lightrft[train]'
python examples/reinforce.py
torchrun --nproc-per-node 2 examples/reinforce.py --backend fsdp
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightrft import Completion, Sampling, Strategy, get_strategy, token_mean_scale
from lightrft.rlvr.models import decode, encode_prompt, tiny_model, tiny_tokenizer
from lightrft.rlvr.policy import completion_batch, completion_logprobs

PROMPTS = ["Say a number:", "Count:", "How many?", "Dial:"]


def reward(text: str) -> float:
    """The share of digits."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def update(
    strategy: Strategy, model: Module, optimizer: Optimizer, completions: Sequence[Completion], advantages: torch.Tensor
) -> None:
    """One update from this rank's completions, in A micro-batches; every token of all ranks has the same weight."""
    scale = token_mean_scale(strategy, sum(len(each.output_token_ids) for each in completions))
    size = strategy.micro_train_batch_size
    for start in range(0, len(completions), size):
        batch = completion_batch(completions[start : start + size], strategy.device)
        gains_BT = completion_logprobs(model, batch) * advantages[start : start + size, None].to(strategy.device)
        loss = -(gains_BT * batch.output_mask_BT).sum() * scale
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model)


def train(strategy: Strategy, args: Namespace) -> None:
    with strategy.init_model_context(), strategy.device:
        plain = tiny_model()
    model, optimizer = strategy.prepare((plain, strategy.create_optimizer(plain, lr=args.lr)))
    strategy.setup_inference_engine(args, "hf", model)
    share = strategy.train_batch_size // strategy.world_size // args.n  # prompts of this rank
    prompts = [PROMPTS[(strategy.get_rank() * share + index) % len(PROMPTS)] for index in range(share)]
    for step in range(args.steps):
        strategy.update_engine_weights(model)
        sampling = Sampling(max_new_tokens=8, n=args.n, seed=args.seed + step)
        ids = [encode_prompt(args.tokenizer, prompt, None) for prompt in prompts]
        completions = strategy.gather_and_generate(sampling, all_prompt_token_ids=ids)
        rewards = torch.tensor([reward(decode(args.tokenizer, each.output_token_ids)) for each in completions])
        groups = rewards.view(-1, args.n)  # the samples of one prompt are adjacent
        update(strategy, model, optimizer, completions, (groups - groups.mean(dim=1, keepdim=True)).flatten())
        mean = strategy.all_reduce(rewards.mean().item())
        strategy.print(f"{step:3} mean reward {mean:.2f}")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--n", type=int, default=16, help="completions of one prompt")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.set_defaults(seed=1, train_batch_size=64, micro_train_batch_size=32, engine_type="hf", bf16=False)
    args = parser.parse_args(namespace=Namespace(tokenizer=tiny_tokenizer()))
    strategy = get_strategy(args)
    strategy.setup_distributed()
    try:
        train(strategy, args)
    finally:
        strategy.close()


if __name__ == "__main__":
    main()
