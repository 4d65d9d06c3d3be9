"""The global norm of a model's gradients, and clipping by it (T3)."""

from __future__ import annotations

from typing import Protocol

from torch.nn import Module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class ClipGradients(Protocol):
    """Scales all gradients of ``model`` by ``rescale``, then to a norm of at most ``max_norm`` (0: no limit).

    Returns the global 2-norm between the two. A norm that is not finite leaves the gradients as they are.
    """

    def __call__(self, model: Module, max_norm: float, rescale: float = 1.0) -> float: ...


def clip_gradients(model: Module, max_norm: float, rescale: float = 1.0) -> float:
    """Clipping where every gradient is whole in this process.

    As ``torch.nn.utils.clip_grad_norm_`` (Pascanu et al., arXiv:1211.5063, section 3.2) over all parameters together.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if rescale != 1.0:
        for gradient in gradients:
            gradient.mul_(rescale)
    norm = get_total_norm(gradients)
    value = float(norm)
    # torch divides by norm + 1e-6; a norm under the limit needs no pass, and one that is not finite no update.
    if 0 < max_norm < value + 1e-6 < float("inf"):
        clip_grads_with_norm_(parameters, max_norm, norm)
    return value
