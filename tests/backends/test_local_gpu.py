"""``local`` on a CUDA device gives the CPU's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from lightrft import StrategyConfig
from lightrft.backends import fake, local
from lightrft.strategy.record import StrategyRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device; run where there is one"),
]


def trained(strategy: StrategyRecord, offload: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    model, optimizer = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-2)))
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 4, generator=generator).to(strategy.device)
        y = torch.randn(4, 2, generator=generator).to(strategy.device)
        if offload:
            strategy.maybe_offload_optimizer(optimizer)
            strategy.reload_model(strategy.offload_model(model))
            strategy.maybe_load_optimizer(optimizer)
        strategy.backward(mse_loss(model(x), y), model, optimizer)
        assert strategy.optimizer_step(optimizer, model).applied
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("offload", [False, True])
def test_T6_FC44_cuda_equals_cpu_offloaded_or_not(offload: bool) -> None:
    config = StrategyConfig(bf16=False, train_batch_size=1)
    strategy = local.build(config)
    assert strategy.device.type == "cuda"
    for mine, theirs in zip(trained(strategy, offload), trained(fake.build(config), False), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0.0)
