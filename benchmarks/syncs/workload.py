"""What training does to the weights between two syncs: flipped bits, or real AdamW steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SCATTERED_BELOW = 0.05  # up to here drawing positions is cheaper than drawing for each element
LEARNING_RATE = 1e-6
_GRADIENT_SCALE = 2e-5  # of an element, with the norm clipped to 1 and 2^31 elements
_TRAINED_ROWS = 0.18  # of an embedding: the tokens that a batch holds


def bits_of(module: nn.Module) -> list[Tensor]:
    """int16[numel] views of the parameters."""
    return [p.detach().view(torch.int16).view(-1) for p in module.parameters()]


def num_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def mutate(module: nn.Module, density: float, seed: int) -> None:
    """Flip the lowest bit of about `density` of the elements of each parameter, in place.

    Positions are random: the same for the same seed on the same kind of device.
    """
    parameters = bits_of(module)
    generator = torch.Generator(parameters[0].device).manual_seed(seed)
    for bits in parameters:
        _flip(bits, density, generator)


def _flip(bits: Tensor, density: float, generator: torch.Generator) -> None:
    device, numel = bits.device, bits.numel()
    if density >= 1:
        bits.bitwise_xor_(1)
    elif density < _SCATTERED_BELOW:
        count = round(density * numel)
        positions = torch.randint(numel, (count,), generator=generator, device=device)
        # A position that is drawn twice is written twice with the same bits.
        bits.index_copy_(0, positions, bits.index_select(0, positions) ^ 1)
    else:
        chance = torch.rand(numel, generator=generator, device=device)
        bits.bitwise_xor_((chance < density).to(bits.dtype))


class Training:
    """AdamW on fp32 masters that began as the bf16 weights, which follow them.

    Gradients are random, independent from step to step: what the gradients of a policy's loss
    look like to Adam, whose step does not depend on their scale. Most rows of the embedding get
    none. There is no model to run, so that only the optimizer's share of a step is here.
    """

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        self.weights = [p.detach() for p in named.values()]
        self.masters = [p.detach().float().requires_grad_() for p in named.values()]
        self._embeddings = [index for index, name in enumerate(named) if "embed" in name]
        device = self.weights[0].device
        self._generator = torch.Generator(device).manual_seed(2)
        self._optimizer = torch.optim.AdamW(
            self.masters, lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.0, fused=True
        )
        for master in self.masters:
            master.grad = torch.empty_like(master)

    def step(self) -> None:
        """One optimizer step, and its result in bf16."""
        for index, master in enumerate(self.masters):
            assert master.grad is not None
            master.grad.normal_(0, _GRADIENT_SCALE, generator=self._generator)
            if index in self._embeddings:
                rows = torch.rand(len(master), generator=self._generator, device=master.device)
                master.grad[rows >= _TRAINED_ROWS] = 0
        self._optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
