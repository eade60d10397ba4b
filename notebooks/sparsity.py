# %% [markdown]
# # From an optimizer's step to the density of a sync
#
# A trainer takes a step, and an engine needs the new weights. In bf16 most of them are the old
# ones, bit for bit. This notebook trains a small language model, counts what changes, and shows
# why:
#
# 1. [What a step has to overcome](#1.-What-a-step-has-to-overcome): half a ULP
# 2. [Which elements change](#2.-Which-elements-change): the small ones
# 3. [The learning rate](#3.-The-learning-rate) decides the density
# 4. [Steps between syncs](#4.-Steps-between-syncs), with and without fp32 masters
# 5. [Layers](#5.-Layers)
# 6. [Bytes](#6.-Bytes): what the changes cost, and when sending everything is cheaper
# 7. [What engines serve](#7.-What-engines-serve): quantized weights change far less
#
# Everything is measured here, on a real optimization; nothing is drawn that was not trained.

# %%
scale = "full"  # "toy": the same in a minute
images = None  # a folder: the pictures of docs/sparsity.md are written there

# %%
import re
import sysconfig
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib_inline.backend_inline import set_matplotlib_formats

from deltasync import sparsity
from deltasync.demo.grpo import group_advantages, grpo_loss
from deltasync.demo.policy import Policy, PolicySize
from deltasync.files.sparsity import Sparsity
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.quant.served import served_weights

set_matplotlib_formats("svg")
torch.manual_seed(0)
torch.set_num_threads(1)  # the model is small

plt.rcParams |= {
    "figure.figsize": (8.5, 4.2),
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "svg.hashsalt": "deltasync",
}
# Okabe and Ito's colours, which colour-blind readers tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#6b6b6b",
)

# %% [markdown]
# ## The model, and two ways to train it
#
# The transformer of `deltasync demo` reads the source of Python's standard library, one byte at a
# time. After some pre-training it is trained by policy gradient, as in reinforcement learning: it
# continues pieces of source, four times each, and is rewarded for every byte that is the author's.
# The gradient is that of `deltasync.demo.grpo`. Some 50 steps teach it little; they show how
# weights move.

# %%
size, pretraining_steps = {
    "toy": (PolicySize(width=96, num_heads=4, num_layers=2), 150),
    "full": (PolicySize(width=192, num_heads=4, num_layers=4), 800),
}[scale]
# What the policy asks of a task.
task = SimpleNamespace(vocabulary_size=128, prompt_length=24, answer_length=8)
PROMPTS, ANSWERS_EACH = 4, 4

sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.from_numpy(np.concatenate([np.fromfile(path, np.uint8) for path in sources]))
text = text[text < task.vocabulary_size].long()
policy = Policy(task, size)
names = [name for name, _ in policy.named_parameters()]
numel = sum(weight.numel() for weight in policy.parameters())
print(f"{len(text):,} bytes of text; {numel:,} parameters in {len(names)} tensors")


# %%
def windows(count, generator):
    """int64[count, prompt and answer] pieces of the text."""
    length = task.prompt_length + task.answer_length
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]


def pretrain(steps):
    """Next bytes, by AdamW at a usual learning rate. Returns the losses in nats a byte."""
    generator, losses = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for _ in range(steps):
        batch = windows(16, generator)
        loss = -policy.answer_log_probs(batch[:, :1], batch[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


losses = pretrain(pretraining_steps)
pretrained = [weight.detach().clone() for weight in policy.parameters()]
print(f"loss {losses[0]:.2f} at first, {np.mean(losses[-50:]):.2f} nats a byte at last")

# %% [markdown]
# Two trainers start from the same bf16 checkpoint, as one downloads it:
#
# - **Masters**: the optimizer keeps fp32 weights and fp32 states, the engine gets them rounded to
#   bf16. This is usual.
# - **Pure bf16**: weights and Adam's states are bf16. What rounds to nothing is lost.
#
# In both the model computes with the bf16 weights; the arithmetic between them is fp32, because
# few CPUs are quick in bf16. Every step samples new answers. AdamW runs at torch's defaults,
# without weight decay or warm-up.
#
# `optimise` yields what an engine would hold after each step, and how far each element was to go:
# AdamW's step is
#
# $$\text{lr} \cdot \hat m / (\sqrt{\hat v} + \epsilon),$$
#
# which is about the learning rate where gradients keep their sign, and less where they do not.


# %%
def policy_gradient(generator):
    """The loss of answers that the policy gives now."""
    pieces = windows(PROMPTS, generator).repeat_interleave(ANSWERS_EACH, dim=0)
    prompts, right = pieces.split([task.prompt_length, task.answer_length], dim=1)
    answers, log_probs = policy.sample(prompts, generator)
    rewards = (answers == right).float().mean(dim=1)
    advantages = group_advantages(rewards, ANSWERS_EACH)
    return grpo_loss(policy.answer_log_probs(prompts, answers), log_probs, advantages)


def flat(tensors):
    """All elements in one row, as deltasync sends them."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def adam_step(optimizer, weight):
    """float32, of a weight's shape: how far the last step was to move each element."""
    group, state = optimizer.param_groups[0], optimizer.state[weight]
    corrections = [1 - beta ** state["step"].item() for beta in group["betas"]]
    spread = (state["exp_avg_sq"].sqrt() / corrections[1] ** 0.5).add_(group["eps"])
    return group["lr"] / corrections[0] * state["exp_avg"].float().abs() / spread.float()


def optimise(start, dtype, lr, steps):
    """Policy gradient from `start`, kept in `dtype`: bf16[numel] weights and AdamW's steps."""
    kept = [weight.to(dtype, copy=True) for weight in start]
    optimizer = torch.optim.AdamW(kept, lr=lr, weight_decay=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight, latest in zip(policy.parameters(), kept, strict=True):
            weight.data.copy_(latest.bfloat16())
        policy.zero_grad()
        policy_gradient(generator).backward()
        for weight, latest in zip(policy.parameters(), kept, strict=True):
            latest.grad = weight.grad.to(dtype)
        optimizer.step()
        yield flat(kept).bfloat16(), flat(adam_step(optimizer, weight) for weight in kept)


# %% [markdown]
# `measure` lets a training settle for 16 steps, because AdamW's first steps are its largest, and
# compares the weights of the next 32 with `deltasync.sparsity`: as 32 syncs of one step, 16 of
# two, and so on to one of 32. Beside what it counts it notes what two simple rules predict:
#
# - **Chance.** A master weight lies anywhere between two midpoints of neighbouring bf16 numbers. A
#   step crosses one with the probability |step| / ULP, at most 1.
# - **Threshold.** A weight that *is* a bf16 number changes if |step| > ULP / 2, and otherwise not
#   at all. (A power of two is half as far from its smaller neighbour: that adds a few changes.)
#
# bf16 has 8 significant bits: the ULP of a weight in $[2^e, 2^{e+1})$ is $2^{e-7}$.

# %%
SETTLE, SPAN = 16, 32
INTERVALS = (1, 2, 4, 8, 16, 32)


def predicted(old, steps):
    """float64[2, 256] by biased exponent: chances added up, and steps over the threshold."""
    biased = (old.float().view(torch.int32) >> 23) & 255
    in_ulps = steps / torch.exp2(biased - 134.0)
    rules = (in_ulps.clamp(max=1), in_ulps > 0.5)
    return np.stack([np.bincount(biased.numpy(), rule.numpy(), 256) for rule in rules])


def by_name(row):
    """The tensors that lie in a row."""
    parts = row.split([weight.numel() for weight in pretrained])
    shaped = (part.view(weight.shape) for part, weight in zip(parts, pretrained, strict=True))
    return dict(zip(names, shaped, strict=True))


# Matrices are served like this, as section 7 shows.
FORMS = {
    "block FP8": BlockFp8(),
    "block FP8, ue8m0": BlockFp8("ue8m0"),
    "NVFP4": CompressedNvfp4(),
    "INT4, groups of 32": Int4(32),
}


def served_bytes(weights, form):
    """uint8[n] codes, and uint8[m] scales, of all matrices in a form."""
    matrices = [
        (name, weight)
        for name, weight in by_name(weights).items()
        if weight.dim() == 2 and name.startswith("blocks.")
    ]
    served = served_weights(matrices, lambda name, shape: form)
    codes, scales = [], []
    for name, tensor in served:
        is_scale = "scale" in name or name.endswith("_shape")
        (scales if is_scale else codes).append(tensor.reshape(-1).view(torch.uint8))
    return torch.cat(codes), torch.cat(scales)


def served_densities(versions):
    """By form: shares of the bytes of codes that change, and of scales, by steps between syncs."""
    found = {}
    for name, form in FORMS.items():
        kept = [served_bytes(weights, form) for weights in versions[SETTLE:]]
        found[name] = {
            k: [
                np.mean([(new[part] != old[part]).float().mean() for old, new in pairs])
                for part in (0, 1)
            ]
            for k in INTERVALS
            if (pairs := list(pairwise(kept[::k])))
        }
    return found


def measure(start, dtype, lr):
    """What changes by steps between syncs, step by step and by tensor; what rules predict."""
    versions, rules = [flat(start).bfloat16()], []
    for weights, steps in optimise(start, dtype, lr, SETTLE + SPAN):
        rules.append(predicted(versions[-1], steps))
        versions.append(weights)
    stops = {k: range(SETTLE + k, SETTLE + SPAN + 1, k) for k in INTERVALS}
    synced = {
        k: sum((sparsity(versions[stop - k], versions[stop]) for stop in stops[k]), Sparsity())
        for k in INTERVALS
    }
    first, last = by_name(versions[-2]), by_name(versions[-1])
    return SimpleNamespace(
        synced=synced,
        served=served_densities(versions) if dtype == torch.float32 else None,
        tensors={name: sparsity(first[name], last[name]) for name in names},
        by_step=[sparsity(*pair).density for pair in pairwise(versions)],
        rules=np.array(rules),
        step_sizes=steps.numpy(),
    )


# %%
RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 1e-4)
PURE_RATES = (1e-6, 3e-6, 1e-5, 1e-4)
STEADY = 3e-6  # the rate of pictures that show one

rounded = [weight.bfloat16().float() for weight in pretrained]
masters = {lr: measure(rounded, torch.float32, lr) for lr in RATES}
pure = {lr: measure(rounded, torch.bfloat16, lr) for lr in PURE_RATES}
resumed = measure(pretrained, torch.float32, STEADY)  # masters that were never rounded

# %% [markdown]
# ## 1. What a step has to overcome
#
# The staircase is half a ULP: below it a step from a bf16 number rounds back to where it came
# from. It passes where the weight is under 256 to 512 times the step. Most weights are larger than
# that.


# %%
def power(exponent):
    return f"$2^{{{exponent}}}$"


def rate(lr):
    """1e-07 as 1e-7, 0.0001 as 1e-4."""
    return f"{lr:.0e}".replace("e-0", "e-")


def show(figure, name=None):
    """Show a picture; write it for docs/sparsity.md, if it has a name there and this run is to."""
    if images and name:
        figure.savefig(Path(images) / f"{name}.svg", facecolor="white", metadata={"Date": None})
    plt.show()


def draw_threshold(found, runs, colours):
    """Half a ULP by weight against AdamW's steps; below it where the weights are."""
    figure, (top, bottom) = plt.subplots(2, sharex=True, height_ratios=(3, 1.2), figsize=(8.5, 5.4))
    edges = np.arange(-18, 3)
    half = np.exp2(edges[:-1] - 8.0)
    top.stairs(half, edges, fill=True, color="#e9e9e9", baseline=1e-12)
    top.stairs(half, edges, color="black", lw=1.5, baseline=None)
    top.text(-2.5, 1e-8, "rounds back:\nnothing changes", ha="center", color=GREY)
    top.text(-6.2, 6e-5, "ULP / 2", ha="right")
    for place, ((lr, run), colour) in enumerate(zip(runs.items(), colours, strict=True)):
        low, middle, high = np.quantile(run.step_sizes, (0.1, 0.5, 0.9))
        top.axhline(lr, color=colour)
        top.text(2, lr, f" lr {rate(lr)}", color=colour, va="center")
        top.plot([0.3 + 0.6 * place] * 2, [low, high], color=colour, lw=7, solid_capstyle="butt")
        top.plot(0.3 + 0.6 * place, middle, "o", color="white", ms=4)
    top.set(yscale="log", ylim=(2e-9, 3e-4), ylabel="size of a step")
    top.set_title("A step from a bf16 number changes it only above the stairs")
    shares = found.exponents[0, edges[:-1] + 127] / found.exponents[0].sum()
    bottom.bar(edges[:-1] + 0.5, 100 * shares, width=0.9, color=GREY)
    bottom.set(xlabel="|weight|", ylabel="weights, %", xlim=(-18, 2))
    bottom.set_xticks(edges[::2], map(power, edges[::2]))
    return figure


shown = {lr: masters[lr] for lr in (1e-7, 1e-6, 1e-5)}
figure = draw_threshold(masters[1e-6].synced[1], shown, (SKY, BLUE, ORANGE))
show(figure, "sparsity-threshold")

# %% [markdown]
# Lines are learning rates; bars hold the middle 80 % of the steps that AdamW took at them, dots
# the median. A typical step is a fraction of the learning rate:

# %%
ratios = masters[STEADY].step_sizes / STEADY
low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
print(f"|step| / lr: 10 % under {low:.2f}, median {middle:.2f}, 90 % under {high:.2f}")

# %% [markdown]
# ## 2. Which elements change
#
# Masters keep what bf16 rounds away, so that small steps add up and cross a midpoint in the end.
# Steps are about alike for all weights, ULPs are not: the chance doubles with every octave that a
# weight is smaller. The receiver holds the old weights, so it knows beforehand where changes are
# likely.


# %%
def draw_exponents(found, chances=None, least=2e-5):
    """Shares that changed, by exponent of the old value; dashed what the chance predicts."""
    figure, (top, bottom) = plt.subplots(2, sharex=True, height_ratios=(3, 1.2), figsize=(8.5, 5))
    elements = sum(one.exponents[0] for one in found.values())
    common = np.flatnonzero(elements > least * elements.sum())
    for (label, one), colour in zip(found.items(), (SKY, BLUE, ORANGE, RED), strict=False):
        share = 100 * one.exponents[1] / np.maximum(one.exponents[0], 1)
        some = common[share[common] > 0]
        top.plot(some - 127, share[some], "o-", ms=4, color=colour, label=label)
        if chances:
            expected = 100 * chances[label] / np.maximum(one.exponents[0], 1)
            top.plot(common - 127, expected[common], "--", lw=1, color=colour)
    if chances:
        top.plot([], [], "--", lw=1, color=GREY, label="chance: |step| / ULP")
    top.set(yscale="log", ylabel="changed, %")
    top.yaxis.set_major_formatter("{x:g}")
    if len(found) > 1:
        top.legend()
    top.set_title("The smaller an element, the likelier it changes")
    bottom.bar(common - 127, 100 * elements[common] / elements.sum(), width=0.9, color=GREY)
    bottom.set(xlabel="|old weight|, from here to twice as much", ylabel="elements, %")
    ticks = [e for e in common - 127 if e % 2 == 0]
    bottom.set_xticks(ticks, [power(e) for e in ticks])
    return figure


shown = {f"lr {rate(lr)}": masters[lr] for lr in (1e-7, 1e-6, 1e-5)}
figure = draw_exponents(
    {label: run.synced[1] for label, run in shown.items()},
    {label: run.rules[SETTLE:, 0].sum(0) for label, run in shown.items()},
)
show(figure, "sparsity-exponents")

# %%
changes = masters[1e-6].synced[1].exponents
small = changes[0].cumsum() <= 0.01 * changes[0].sum()
share = changes[1][small].sum() / changes[1].sum()
held = changes[0][small].sum() / changes[0].sum()
print(f"lr 1e-6: the smallest {held:.2%} of the elements have {share:.0%} of the changes")

# %% [markdown]
# Large elements fall short of the dashed lines, because these masters started *on* bf16 numbers,
# half a ULP from the next midpoint, and 48 steps took them nowhere near it. Masters that
# pre-training left anywhere follow the rule from the first step. Step by step, at one learning
# rate:


# %%
def draw_steps_of_training(runs, lr):
    """Density of each step under three trainers, with what the rules predict."""
    figure, axes = plt.subplots()
    for (label, run), colour in zip(runs.items(), (GREEN, BLUE, ORANGE), strict=True):
        x = np.arange(1, len(run.by_step) + 1)
        axes.plot(x, 100 * np.array(run.by_step), color=colour, label=label)
    chance, threshold = 100 * run.rules.sum(2).T / numel
    axes.plot(x, chance, "--", lw=1, color="black", label="chance: |step| / ULP")
    axes.plot(x, threshold, ":", color="black", label="threshold: |step| > ULP / 2")
    axes.set(yscale="log", xlabel="optimizer step", ylabel="elements changed, %")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"Fresh masters start at the threshold and drift to the chance (lr {rate(lr)})")
    axes.legend(ncols=2)
    return figure


runs = {
    "masters, kept from pre-training": resumed,
    "masters, started from bf16": masters[STEADY],
    "pure bf16": pure[STEADY],
}
show(draw_steps_of_training(runs, STEADY))

# %% [markdown]
# ## 3. The learning rate
#
# decides how large a step is, and so how many cross. Diamonds were measured on a 16.9
# M-parameter language model that was trained in the same two ways. Models differ by how large their
# weights are: compare slopes and ratios rather than densities.

# %%
# Percent of elements changed by one step with masters.
REFERENCE = {1e-7: 0.075, 3e-7: 0.23, 1e-6: 0.74, 3e-6: 2.0, 1e-5: 5.6, 1e-4: 27}


# %%
def draw_rates():
    """Density of one step by learning rate, with what the rules predict."""
    figure, axes = plt.subplots()
    for label, runs, rule, line, colour in (
        ("fp32 masters", masters, 0, "--", BLUE),
        ("pure bf16", pure, 1, ":", ORANGE),
    ):
        density = [100 * run.synced[1].density for run in runs.values()]
        rates = [100 * run.rules[SETTLE:, rule].sum() / SPAN / numel for run in runs.values()]
        text = ("chance: |step| / ULP", "threshold: |step| > ULP / 2")[rule]
        axes.plot(list(runs), density, "o-", color=colour, label=label)
        axes.plot(list(runs), rates, line, color=colour, label=f"predicted, {text}")
    other = list(REFERENCE), list(REFERENCE.values())
    axes.plot(*other, "D", mfc="none", color=GREY, label="16.9 M, masters")
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="elements changed, %")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("Density of one step grows with the learning rate")
    axes.legend()
    return figure


show(draw_rates())
for lr, run in pure.items():
    expected = run.rules[SETTLE:, 1].sum()
    print(f"pure bf16, lr {rate(lr)}: {run.synced[1].changed:,} changes, {expected:,.0f} predicted")

# %% [markdown]
# ## 4. Steps between syncs
#
# With masters, more and more elements cross a midpoint. Without, the elements whose steps are
# large enough move again and again, and the rest never: a sync of 32 steps is hardly larger than
# one of a single step.


# %%
def draw_intervals():
    """Density by steps between syncs."""
    figure, axes = plt.subplots(figsize=(8.5, 5))
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(RATES)))
    kinds = (("fp32 masters", masters, "o-"), ("pure bf16", pure, "s:"))
    for label, runs, style in kinds:
        for lr, run in runs.items():
            density = [100 * found.density for found in run.synced.values()]
            colour = shades[RATES.index(lr)]
            axes.plot(INTERVALS, density, style, ms=4, color=colour)
            if runs is masters:
                axes.text(34, density[-1], f"lr {rate(lr)}", color=colour, va="center")
        axes.plot([], [], style, color=GREY, label=label)
    axes.set(xscale="log", yscale="log", xlabel="optimizer steps between syncs", xlim=(0.9, 52))
    axes.set(ylabel="elements changed, %")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(INTERVALS, map(str, INTERVALS))
    axes.minorticks_off()
    axes.set_title("Waiting longer makes syncs larger, but fewer bytes a step")
    axes.legend()
    return figure


show(draw_intervals(), "sparsity-intervals")

# %% [markdown]
# ## 5. Layers


# %%
def draw_layers(found, title):
    """Density by kind of tensor: a dot for each layer, from the first (dark) to the last."""
    kinds = {}
    for name, one in found.items():
        number = re.search(r"\d+", name)
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(
            (int(number[0]) if number else 0, one)
        )
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.3 * len(kinds)))
    for row, layers in enumerate(kinds.values()):
        depths = [depth for depth, _ in layers]
        densities = [100 * one.density for _, one in layers]
        colours = plt.get_cmap("viridis")(np.array(depths) / max([1, *depths]) * 0.85)
        axes.scatter(densities, [row] * len(layers), c=colours, s=36)
    whole = 100 * sum(found.values(), Sparsity()).density
    axes.axvline(whole, color=GREY, ls="--")
    axes.text(whole, -0.9, " all", color=GREY, va="top")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set(xlabel="elements changed, %", ylim=(len(kinds) - 0.4, -0.9))
    axes.set_xlim(left=min(0, axes.get_xlim()[0]))
    axes.set_title(title)
    return figure


title = "Norms never change, matrices of small weights most (one step at lr 1e-6)"
show(draw_layers(masters[1e-6].tensors, title))

# %% [markdown]
# Weights of norms are about 1, where half a ULP is 0.0039 or 0.002: no step gets there. Dots are
# layers, dark ones the first. In the 16.9 M model, at 1e-6: embedding 0.15 % (82 % of its rows
# untouched: rare tokens), head 0.45 %, attention 0.84 %, MLP 1.0 %, norms 0.


# %% [markdown]
# ## 6. Bytes
#
# What the changes take, each encoding with the density at which it meets the dense one. deltasync
# sends u16 places in tiles of 4,096 elements and new values, 4 bytes a change and 6 a tile, or a
# whole tile where that is shorter.

# %%
ENCODINGS = {  # (colour, line)
    "int32 + value": (BLUE, "-"),
    "int32 + value, zstd": (BLUE, "--"),
    "u16 gap + value": (ORANGE, "-"),
    "u16 gap + value, zstd": (ORANGE, "--"),
    "u8 gap + u8 step": (GREEN, "-"),
    "u8 gap + u8 step, zstd": (GREEN, "--"),
    "bitmap + value": (PURPLE, "-."),
}


def draw_bytes(syncs):
    """Bytes a change, and of a sync against the whole model's, by density."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 5))
    syncs = sorted(syncs, key=lambda one: one.density)
    density = np.array([one.density for one in syncs])
    dense = np.array([one.encodings["dense"] for one in syncs])
    for name, (colour, line) in ENCODINGS.items():
        sizes = np.array([one.encodings[name] for one in syncs])
        changed = np.array([one.changed for one in syncs])
        left.plot(100 * density, sizes / changed, line, color=colour, label=name)
        right.plot(100 * density, 100 * sizes / dense, line, color=colour)
    right.axhline(100, color="black")
    right.text(100 * density[0], 110, "dense", va="bottom")
    left.set(xscale="log", xlabel="elements changed, %", ylabel="bytes for a changed element")
    left.set_ylim(0, 12)
    left.set_title("Bytes of a change")
    right.set(
        xscale="log", yscale="log", xlabel="elements changed, %", ylabel="of the dense bytes, %"
    )
    right.set_title("Bytes of a sync against sending everything")
    for axis in (left.xaxis, right.xaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


syncs = [found for run in masters.values() for found in run.synced.values()]
show(draw_bytes(syncs))

# %% [markdown]
# The 16.9 M model, at 1e-6 and k = 1 (0.74 % changed): int32 + value 6.00, with zstd 4.91, u8 gap
# + u8 step 2.40, with zstd 1.40 bytes a change.
#
# ## 7. What engines serve
#
# Many engines serve quantized weights. A code has fewer bits than bf16, so that a step crosses its
# midpoints more rarely: what is served changes far less than what is trained. `deltasync.quant`
# makes the engine's codes and scales of the bf16 weights, and a sync compares those.


# %%
def draw_served(runs):
    """Shares of changed bytes by form: by learning rate at k = 1, and by k at one rate."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.6), sharey=True)
    looks = ((BLUE, "o-"), (SKY, "s:"), (GREEN, "o-"), (ORANGE, "o-"))
    masters_left = [100 * run.synced[1].density for run in runs.values()]
    left.plot(list(runs), masters_left, "o-", color=GREY, label="bf16 elements")
    one = runs[1e-6]
    right.plot(INTERVALS, [100 * one.synced[k].density for k in INTERVALS], "o-", color=GREY)
    for name, (colour, line) in zip(FORMS, looks, strict=True):
        by_rate = [100 * run.served[name][1][0] or np.nan for run in runs.values()]
        by_interval = [100 * one.served[name][k][0] or np.nan for k in INTERVALS]
        left.plot(list(runs), by_rate, line, color=colour, label=f"{name}: bytes of codes")
        right.plot(INTERVALS, by_interval, line, color=colour)
    left.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="changed, %")
    right.set(xscale="log", xlabel="optimizer steps between syncs, at lr 1e-6")
    right.set_xticks(INTERVALS, map(str, INTERVALS))
    right.minorticks_off()
    left.yaxis.set_major_formatter("{x:g}")
    left.set_title("Quantized weights change less")
    right.set_title("Also where syncs are rare")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


show(draw_served(masters), "sparsity-served")

# %% [markdown]
# Scales follow the largest element of their block, which moves rarely; powers of two (ue8m0)
# nearly never. The scales of NVFP4 and INT4 cover few elements, and change with them.
#
# `deltasync diff` counts what changes between two checkpoints of yours.
