"""What runs beside vLLM's model: weights in, and logits at the temperature.

vLLM mixes :class:`WeightReceiver` into its worker by name (``worker_extension_cls``, which it documents) and calls the
methods by ``collective_rpc``; their names must not exist on the worker. It is all of this package that touches the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RECEIVER = f"{__name__}.WeightReceiver"
"""How vLLM finds it."""


class Runner(Protocol):
    """vLLM's model runner."""

    model: Module


class Worker(Protocol):
    """What vLLM's worker is asked for, on the CPU as on CUDA."""

    @property
    def model_runner(self) -> Runner: ...
    @property
    def vllm_config(self) -> VllmConfig: ...


class Loads(Protocol):
    """Every model of vLLM takes weights by the names of the Hugging Face checkpoint."""

    def load_weights(self, weights: Sequence[tuple[str, Tensor]], /) -> object: ...


class WeightReceiver:
    """Methods for vLLM's worker. Weights come in three steps, so that they can come in buckets."""

    def lightrft_start_update(self: Worker) -> None:
        """From here on each layer waits for its weights; as soon as it has all it takes them, in place."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.model)

    def lightrft_load_weights(self: Worker, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        """One bucket. vLLM keeps the tensors until their layers are whole."""
        from vllm.config import set_current_vllm_config

        model: Loads = self.model_runner.model  # type: ignore[assignment]  # vLLM's models have it, modules do not
        with set_current_vllm_config(self.vllm_config):
            model.load_weights(named_tensors)

    def lightrft_finish_update(self: Worker) -> None:
        """Layers that got nothing keep what they had; one that got a part is left as it is."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            # A head that is tied to the embeddings is no layer of its own to vLLM's reload. On the CPU it computes with
            # a copy in another layout, which would stay the old weights'.
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def lightrft_divide_logits(self: Worker, temperature: float) -> None:
        """Logits come divided by ``temperature`` from now on, in fp32.

        vLLM reports log-probabilities either before the temperature or after top-p and top-k. With the temperature in
        the logits the former are those that ``Completion`` means, whatever the filters.
        """
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        def divided(module: Module, args: object, logits: Tensor | None) -> Tensor | None:
            return None if logits is None else logits.float() / temperature

        for module in self.model_runner.model.modules():
            if isinstance(module, LogitsProcessor):
                for handle in module.__dict__.pop("_lightrft_hooks", ()):
                    handle.remove()
                if temperature != 1.0:
                    module.__dict__["_lightrft_hooks"] = [module.register_forward_hook(divided)]
