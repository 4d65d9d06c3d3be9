from abc import ABC

from torch.nn import Module

class QuantizeMethodBase(ABC):
    def process_weights_after_loading(self, layer: Module) -> None: ...

class ParallelLMHead(Module):
    quant_method: QuantizeMethodBase
