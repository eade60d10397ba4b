"""`python -m benchmarks.served`: which share of served bytes a training step changes, on a CPU.

A small policy learns to sort digits, is rounded to bfloat16 as a checkpoint is, and then trained by
policy gradient and AdamW from float32 masters, the usual way. After each step the matrices of its
blocks are quantized from their bfloat16 rounding, and compared with those of the step before.

A changed element costs its index (int32) and its value, as in a sparse payload without a codec.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from deltasync.delta.bits import as_bits
from deltasync.demo.grpo import group_advantages, grpo_loss
from deltasync.demo.policy import Policy, PolicySize
from deltasync.demo.task import SortTask
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from deltasync.quant.served import Forms, served_weights

FORMS: dict[str, Form | None] = {
    "bfloat16": None,
    "block FP8": BlockFp8(),
    "NVFP4, compressed-tensors": CompressedNvfp4(),
    "NVFP4, ModelOpt": ModelOptNvfp4(),
    "INT4, 32": Int4(32),
    "INT4, 128": Int4(128),
}
SIZES = {"full": PolicySize(384, 6, 4), "toy": PolicySize(128, 2, 1)}
STEPS = {"full": (100, 16, 8), "toy": (20, 4, 2)}
"""Supervised steps, then steps at the learning rate until AdamW has settled, then measured ones."""
_PROMPTS, _GROUP = 16, 8
_INDEX = 4  # bytes
_BYTES = ", bytes"  # words of codes, counted as bytes

Count = tuple[int, int, int]
"""Elements that changed, all of them, and bytes of an element."""


class Training:
    """A policy in float32 masters, and its optimizer."""

    def __init__(self, size: PolicySize) -> None:
        torch.manual_seed(0)
        self.task = SortTask()
        self.policy = Policy(self.task, size)
        self.generator = torch.Generator().manual_seed(0)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=7e-4, weight_decay=0)

    def teach(self) -> None:
        """One step towards the right answers."""
        prompts = self.task.sample_prompts(32, self.generator)
        self._step(-self.policy.answer_log_probs(prompts, self.task.solutions(prompts)).mean())

    def begin(self, lr: float) -> None:
        """Begin anew from the bfloat16 rounding."""
        for weight in self.policy.parameters():
            weight.data = weight.data.bfloat16().float()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=lr, weight_decay=0)

    def reinforce(self) -> None:
        """One step of policy gradient; each right digit is rewarded."""
        prompts = self.task.sample_prompts(_PROMPTS, self.generator).repeat_interleave(_GROUP, 0)
        answers, log_probs = self.policy.sample(prompts, self.generator)
        rewards = (answers == self.task.solutions(prompts)).float().mean(dim=1)
        now = self.policy.answer_log_probs(prompts, answers)
        self._step(grpo_loss(now, log_probs, group_advantages(rewards, _GROUP)))

    def _step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def matrices(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """bfloat16: what a served model has quantized."""
    for name, weight in policy.named_parameters():
        if name.startswith("blocks.") and weight.dim() == 2:
            yield name, weight.detach().bfloat16()


def served(policy: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What is served in each form."""
    weights = list(matrices(policy))
    return {label: dict(served_weights(weights, all_in(form))) for label, form in FORMS.items()}


def all_in(form: Form | None) -> Forms:
    return lambda name, shape: form


def counted(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Count]:
    """What changed in each form of one version, by the kind of tensor: "weight_packed"."""
    counts: dict[str, Count] = {}
    for name, tensor in new.items():
        kind = name.rpartition(".")[2]
        _count(counts, kind, as_bits(old[name]), as_bits(tensor))
        if tensor.dtype == torch.int32:
            _count(counts, kind + _BYTES, old[name].view(torch.uint8), tensor.view(torch.uint8))
    return counts


def _count(counts: dict[str, Count], kind: str, old: Tensor, new: Tensor) -> None:
    changed, numel, size = counts.get(kind, (0, 0, new.element_size()))
    counts[kind] = changed + int((old != new).sum()), numel + new.numel(), size


def measure(scale: str, lr: float) -> dict[str, list[dict[str, Count]]]:
    """Counts of each step, by form."""
    taught, settling, measured = STEPS[scale]
    training = Training(SIZES[scale])
    for _ in range(taught):
        training.teach()
    training.begin(lr)
    for _ in range(settling):
        training.reinforce()
    before, found = served(training.policy), {label: list[dict[str, Count]]() for label in FORMS}
    for _ in range(measured):
        training.reinforce()
        after = served(training.policy)
        for label, counts in found.items():
            counts.append(counted(before[label], after[label]))
        before = after
    return found


def sent(counts: Mapping[str, Count]) -> int:
    """Bytes of a sparse payload, words of codes as words."""
    words = (count for kind, count in counts.items() if not kind.endswith(_BYTES))
    return sum(map(_cost, words))


def _cost(count: Count) -> int:
    changed, _, size = count
    return changed * (_INDEX + size)


def lines(found: Mapping[str, list[dict[str, Count]]]) -> Iterator[str]:
    """A table: means over the steps."""
    reference = sum(map(sent, found["bfloat16"]))
    yield f"{'form':28}{'tensor':22}{'changed, %':>12}{'bytes a sync':>14}{'of bf16':>10}"
    for label, steps in found.items():
        total = sum(map(sent, steps))
        for kind in steps[0]:
            changed = sum(counts[kind][0] for counts in steps)
            numel = sum(counts[kind][1] for counts in steps)
            cost = sum(_cost(counts[kind]) for counts in steps) / len(steps)
            yield f"{label:28}{kind:22}{100 * changed / numel:12.5f}{cost:14,.0f}"
        ratio = f"1/{reference / total:.0f}" if total else "nothing"
        yield f"{'':28}{'all':22}{'':12}{total / len(steps):14,.0f}{ratio:>10}"


def main(scale: str = "full", lr: str = "1e-6") -> None:
    print(f"{scale}, learning rate {lr}, one step between syncs")
    print("\n".join(lines(measure(scale, float(lr)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
