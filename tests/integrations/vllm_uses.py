"""What our files use of vLLM, read from their source without importing them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

BASE = "vllm.distributed.weight_transfer.base.WeightTransferEngine"
TRAINER_BASE = "vllm.distributed.weight_transfer.base.TrainerWeightTransferEngine"
OURS = sorted((Path(__file__).parents[2] / "deltasync" / "integrations").glob("vllm*.py"))
# What objects are, by the names that our files have for them.
_CLASSES = {
    "_engine": "vllm.v1.engine.async_llm.AsyncLLM",
    "_llm": "vllm.entrypoints.llm.LLM",
    "core": "vllm.v1.engine.core.EngineCoreProc",
    "current_platform": "vllm.platforms.interface.Platform",
    "llm_engine": "vllm.v1.engine.llm_engine.LLMEngine",
    "model_executor": "vllm.v1.executor.abstract.Executor",
    "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "loader": "vllm.model_executor.model_loader.default_loader.DefaultModelLoader",
    "parallel": "vllm.config.parallel.ParallelConfig",
    "parallel_config": "vllm.config.parallel.ParallelConfig",
    "worker": "vllm.v1.worker.gpu_worker.Worker",
}
_HTTP = "vllm.distributed.weight_transfer.HTTPVLLMWeightSyncClient"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Use:
    """A name of vLLM's; for a call, how many arguments it is given, and which keywords."""

    name: str
    call: tuple[int, tuple[str, ...]] | None = None

    def fits(self, facts: Mapping[str, str]) -> bool:
        """Whether a vLLM has it, with arguments like that."""
        fact = facts.get(self.name)
        if fact is None or self.call is None:
            return fact is not None
        assert fact.startswith("("), f"the arguments of {self.name} are not noted"
        number, keywords = self.call
        called = inspect.signature(eval(f"lambda {fact[1:-1]}: None"))
        try:
            called.bind(*range(number), **dict.fromkeys(keywords))
        except TypeError:
            return False
        return True


_BY_HAND = {
    Use(f"{_HTTP}.base_url"),
    Use(f"{_HTTP}.timeout"),
    Use(f"{TRAINER_BASE}.__init__", (0, ("client", "source", "is_sender"))),
}


def uses() -> set[Use]:
    """What our files import, take from objects of vLLM's, wrap or inherit, and HTTP routes."""
    found = set[Use]()
    for path in OURS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = dict(_imports(tree))
        found |= {Use(name) for name in imported.values()}
        for node in ast.walk(tree):
            match node:
                case ast.Attribute() if name := _used(node, imported):
                    found.add(Use(name))
                case ast.Call(func=func, args=args) if name := _used(func, imported):
                    keywords = tuple(one.arg for one in node.keywords if one.arg)
                    found.add(Use(name, (len(args), keywords)))
                case ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr="_http"), attr=method),
                    args=[ast.Constant(value=str(route)), *_],
                ):
                    found.add(Use(f"{method} /{route}"))
                case ast.AnnAssign(target=ast.Name(id="_TOUCHES"), value=ast.Dict(keys=keys)):
                    names = [ast.literal_eval(key) for key in keys if key is not None]
                    found |= {Use(f"{_CLASSES['worker']}.{name}") for name in names}
    found |= {Use(f"{BASE}.{name}") for name in _inherited(our_class("DeltaSyncEngine"))}
    found |= {Use(f"{TRAINER_BASE}.{name}") for name in _inherited(our_class("DeltaSyncTrainer"))}
    return found | _BY_HAND


def our_class(name: str) -> ast.ClassDef:
    """A class of ours that vLLM makes: one implements BASE, one TRAINER_BASE."""
    for path in OURS:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
    raise LookupError(name)


def methods(node: ast.AST) -> list[Function]:
    """Of a class."""
    assert isinstance(node, ast.ClassDef)
    return [one for one in node.body if isinstance(one, Function)]


def arguments(node: Function, *, is_member: bool = True) -> str:
    """With None for each default, and without what methods are bound to."""
    given = deepcopy(node.args)
    for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if one is not None:
            one.annotation = None
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
    if is_member and "staticmethod" not in map(ast.unparse, node.decorator_list):
        del (given.posonlyargs or given.args)[0]
    return f"({ast.unparse(given)})"


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"


def _used(node: ast.expr, imported: Mapping[str, str]) -> str | None:
    """What vLLM calls `name`, `owner.name` or `any.owner.name`, if it is vLLM's."""
    match node:
        case ast.Name(id=name):
            return imported.get(name)
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
            known = _CLASSES.get(owner) or imported.get(owner)
            return known and f"{known}.{name}"
    return None


def _inherited(node: ast.ClassDef) -> set[str]:
    """The attributes of `self` that the class has not got itself."""
    own, used = {method.name for method in methods(node)}, set[str]()
    for one in ast.walk(node):
        match one:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=context):
                (own if isinstance(context, ast.Store) else used).add(name)
    return used - own
