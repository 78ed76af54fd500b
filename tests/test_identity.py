"""Which changes to a model make it another one."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from tiny import build, tiny_config, tiny_tokenizer

from contextmem.backbone import Backbone
from contextmem.codec import Codec
from contextmem.identity import identity_of

TOKENIZER = tiny_tokenizer()
CODEC = Codec(TOKENIZER)


def test_attached_but_disabled_adapters_do_not_change_the_identity() -> None:
    bare = build(tiny_config("llama"))
    plain = identity_of(Backbone.of(bare), CODEC)
    wrapped = get_peft_model(
        build(tiny_config("llama")), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    active = identity_of(Backbone.of(wrapped), CODEC)
    with wrapped.disable_adapter():
        assert identity_of(Backbone.of(wrapped), CODEC) == plain
    assert active["weights"] == plain["weights"] and active["adapters"] != plain["adapters"] == "none"


def test_the_smallest_training_step_changes_the_identity() -> None:
    model = build(tiny_config("llama"))
    before = identity_of(Backbone.of(model), CODEC)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1 + 1e-6)
    after = identity_of(Backbone.of(model), CODEC)
    assert [name for name in before if before[name] != after[name]] == ["weights"]
    assert identity_of(Backbone.of(model), CODEC) == after
