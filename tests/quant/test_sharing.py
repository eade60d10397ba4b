"""Matrices that engines fuse, and the scales that these share."""

from __future__ import annotations

from deltasync.quant.sharing import siblings


def test_layers_that_engines_fuse_share() -> None:
    qkv = tuple(f"model.layers.3.self_attn.{one}_proj.weight" for one in "qkv")
    assert siblings(qkv[1]) == qkv
    assert siblings("gate_proj.weight") == ("gate_proj.weight", "up_proj.weight")
    assert siblings("experts.7.w3.weight") == ("experts.7.w1.weight", "experts.7.w3.weight")
    assert siblings("model.layers.3.mlp.down_proj.weight") == (
        "model.layers.3.mlp.down_proj.weight",
    )
    assert siblings("a.own.weight", [("own", "other")]) == ("a.own.weight", "a.other.weight")
