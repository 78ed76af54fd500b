"""Every method on every architecture: what it promises, measured against a context rebuilt from the same ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import (
    assert_equals_reference,
    assert_unchanged,
    cache_argument,
    floor,
    layer_tensors,
    plain_cache,
    reference,
    same_tensors,
    snapshot,
)
from tiny import WINDOW, build, tiny_config, tiny_model, tiny_tokenizer

from contextmem import ContextMemory, InvalidInput, SegmentNotFound, SuffixRepair, UnsupportedEdit
from contextmem.retraction import METHODS, delete_and_shift
from contextmem.retraction.refill import Refill

TEXTS = ["First come the apples. ", "Then there are pears! ", "At last a plum, a fig. ", "And some old bread."]
REMOVING = [name for name in METHODS if name not in ("crop", "instruct")]


def filled(memory: ContextMemory) -> list[Any]:
    return [memory.append(text) for text in TEXTS]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_recompute_equals_a_context_that_never_had_it(memory: ContextMemory, which: int) -> None:
    segments = filled(memory)
    report = memory.retract(segments[which], method="recompute")
    assert report.guarantee == "exact"
    assert report.tokens_recomputed == sum(len(t) for t in TEXTS[which + 1 :])
    assert_equals_reference(memory)


def test_recompute_of_several_spans_equals_reference(memory: ContextMemory) -> None:
    segments = filled(memory)
    memory.retract([segments[2], segments[0]], method="recompute")
    assert [s.text for s in memory.segments()] == [TEXTS[1], TEXTS[3]]
    assert_equals_reference(memory)


def test_crop_cuts_the_tail_exactly(memory: ContextMemory) -> None:
    segments = filled(memory)
    kept = layer_tensors(memory)
    report = memory.retract(segments[2:], method="crop")
    assert report.guarantee == "exact" and report.tokens_recomputed == 0
    n = memory.seq_length
    assert same_tensors(layer_tensors(memory), [(k[:, :, :n], v[:, :, :n]) for k, v in kept])
    assert_equals_reference(memory)


def test_crop_refuses_a_middle_span(memory: ContextMemory) -> None:
    segments = filled(memory)
    before = snapshot(memory)
    with pytest.raises(UnsupportedEdit, match="tokens stand after"):
        memory.retract(segments[1], method="crop")
    assert_unchanged(memory, before)


def test_delete_and_shift_gives_layer_0_keys_of_a_fresh_context(memory: ContextMemory) -> None:
    segments = filled(memory)
    memory.retract(segments[1], method="delete_and_shift")
    past, _ = plain_cache(memory.model, memory.token_ids)
    ours, theirs = memory.past_key_values.layers[0].keys, past.layers[0].keys
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert memory.next_position == memory.seq_length


def test_mask_leaves_everything_outside_the_span_bit_identical(memory: ContextMemory) -> None:
    segments = filled(memory)
    before = layer_tensors(memory)
    start, stop = segments[1].start, segments[1].stop
    memory.retract(segments[1], method="mask")
    outside = [
        (torch.cat((k[:, :, :start], k[:, :, stop:]), 2), torch.cat((v[:, :, :start], v[:, :, stop:]), 2))
        for k, v in before
    ]
    assert same_tensors(layer_tensors(memory), outside)
    assert memory.next_position == memory.seq_length + stop - start


@pytest.mark.parametrize("which", [0, 1, 2])
def test_pruned_cache_with_positions_equals_a_masked_full_cache(memory: ContextMemory, which: int) -> None:
    """The gap is inside the sliding window (24) for later spans and outside it for the first."""
    segments = filled(memory)
    ids, hidden = memory.token_ids, range(segments[which].start, segments[which].stop)
    memory.retract(segments[which], method="mask")
    probe = memory._codec.encode("Which one?")
    masked = masked_full_cache(memory.model, ids, hidden, probe)
    assert (memory.logits("Which one?") - masked).abs().max() <= 5 * floor(memory.model, ids)


def masked_full_cache(model: Any, ids: tuple[int, ...], hidden: range, probe: tuple[int, ...]) -> torch.Tensor:
    """Logits after `probe` over a full cache of transformers' own in which the slots `hidden` are masked out."""
    past, _ = plain_cache(model, ids)
    columns = torch.arange(len(ids) + len(probe))
    rows = torch.arange(len(ids), len(ids) + len(probe))[:, None]
    seen = (columns <= rows) & ~torch.isin(columns, torch.tensor(list(hidden)))
    near = seen & (rows - columns < WINDOW)

    def as_mask(allowed: torch.Tensor) -> torch.Tensor:
        if model.config._attn_implementation == "sdpa":
            return allowed[None, None]
        return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]

    kind = model.config.model_type
    mask: Any = as_mask(near if getattr(model.config, "sliding_window", None) else seen)
    if kind == "gemma3_text":
        mask = {"full_attention": as_mask(seen), "sliding_attention": as_mask(near)}
    more = {"attention_mask": mask, "use_cache": True, cache_argument(model): past}
    with torch.no_grad():
        output = model(torch.tensor([probe]), position_ids=rows.T, **more)
    return output.logits[0, -1].float()


@pytest.mark.parametrize("where", ["erase", "query"])
def test_suffix_repair_recomputes_its_share_and_shifts_the_rest(memory: ContextMemory, where: str) -> None:
    segments = filled(memory)
    shifted = memory.fork()
    shifted.retract(segments[1], method="delete_and_shift")
    report = memory.retract(segments[1], method=SuffixRepair(where=where, share=0.5))
    suffix = len(TEXTS[2]) + len(TEXTS[3])
    assert report.tokens_recomputed == -(-suffix // 2)
    untouched = (
        slice(segments[1].start + report.tokens_recomputed, None)
        if where == "erase"
        else slice(segments[1].start, memory.seq_length - report.tokens_recomputed)
    )
    for (k, v), (sk, sv) in zip(layer_tensors(memory), layer_tensors(shifted), strict=True):
        assert torch.equal(k[:, :, untouched], sk[:, :, untouched]) and torch.equal(
            v[:, :, untouched], sv[:, :, untouched]
        )
    past, _ = plain_cache(memory.model, memory.token_ids)
    keys, expected = memory.past_key_values.layers[0].keys, past.layers[0].keys
    assert (keys - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_suffix_repair_of_everything_is_exact(memory: ContextMemory) -> None:
    segments = filled(memory)
    memory.retract(segments[1], method=SuffixRepair(share=1.0))
    assert_equals_reference(memory)


@pytest.mark.parametrize("n_after", [0, 7, 1000])
def test_refill_computes_blanks_and_the_next_tokens_in_place(memory: ContextMemory, n_after: int) -> None:
    segments = filled(memory)
    before, ids = layer_tensors(memory), list(memory.token_ids)
    start, stop = segments[1].start, segments[1].stop
    end = min(stop + n_after, len(ids))
    report = memory.retract(segments[1], method=Refill(n_after))
    assert report.tokens_recomputed == end - start and report.tokens_reused == len(ids) - (end - start)
    after = layer_tensors(memory)
    assert same_tensors(
        [(k[:, :, :start], v[:, :, :start]) for k, v in after], [(k[:, :, :start], v[:, :, :start]) for k, v in before]
    )
    assert same_tensors(
        [(k[:, :, end:], v[:, :, end:]) for k, v in after], [(k[:, :, end:], v[:, :, end:]) for k, v in before]
    )
    ids[start:stop] = memory._codec.encode("\n") * (stop - start)
    past, _ = plain_cache(memory.model, ids)
    for (k, v), layer in zip(after, past.layers, strict=True):
        torch.testing.assert_close(k[:, :, start:end], layer.keys[:, :, start:end], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(v[:, :, start:end], layer.values[:, :, start:end], rtol=1e-3, atol=1e-4)


def test_erased_spans_that_nothing_follows_go_too(memory: ContextMemory) -> None:
    segments = filled(memory)
    memory.retract([segments[1], segments[2]], method="kveraser")
    memory.retract(segments[3])
    assert memory.seq_length == segments[0].stop and memory._state.is_exact
    memory.append("More of it. ")
    assert_equals_reference(memory)


def test_instruct_removes_nothing_and_says_so(memory: ContextMemory) -> None:
    segments = filled(memory)
    before = layer_tensors(memory)
    report = memory.retract(segments[1], method="instruct")
    assert (report.guarantee, report.tokens_removed, report.segments) == ("none", 0, ())
    assert memory.segments()[1].state == "live"
    n = before[0][0].shape[2]
    assert same_tensors([(k[:, :, :n], v[:, :, :n]) for k, v in layer_tensors(memory)], before)
    assert segments[1].text.strip() in memory.segments()[-1].text


@pytest.mark.parametrize("method", REMOVING)
def test_settle_makes_every_method_exact(memory: ContextMemory, method: str) -> None:
    segments = filled(memory)
    memory.retract(segments[1], method=method)
    memory.append(" More.")
    memory.settle()
    assert memory.next_position == memory.seq_length
    assert memory.verify().is_equal
    assert_equals_reference(memory)


@pytest.mark.parametrize("method", REMOVING)
def test_recompute_after_an_approximate_edit_is_exact_again(memory: ContextMemory, method: str) -> None:
    segments = filled(memory)
    memory.retract(segments[0], method=method)
    report = memory.retract(segments[2], method="recompute")
    assert report.guarantee == "exact"
    assert_equals_reference(memory)


@pytest.mark.parametrize("method", ["auto", *REMOVING])
def test_dry_run_changes_nothing_and_foretells_the_report(memory: ContextMemory, method: str) -> None:
    segments = filled(memory)
    before = snapshot(memory)
    plan = memory.retract(segments[1], method=method, dry_run=True)
    assert plan.dry_run
    assert_unchanged(memory, before)
    done = memory.retract(segments[1], method=method)
    for field in ("method", "guarantee", "segments", "tokens_removed", "tokens_recomputed", "tokens_reused"):
        assert getattr(plan, field) == getattr(done, field)


def test_auto_cuts_the_tail_and_recomputes_the_middle(model: Any) -> None:
    memory = ContextMemory(model, tiny_tokenizer(), eraser=None)
    segments = filled(memory)
    assert memory.retract(segments[3]).method == "crop"
    assert memory.retract(segments[1]).method == "recompute"
    assert_equals_reference(memory)


def test_retracting_everything_leaves_an_empty_context(memory: ContextMemory) -> None:
    memory.retract(filled(memory))
    assert memory.seq_length == 0 and memory.token_ids == () and memory.next_position == 0
    fresh = ContextMemory(memory.model, memory.tokenizer)
    memory.append("again"), fresh.append("again")
    assert same_tensors(layer_tensors(memory), layer_tensors(fresh))


def test_shift_works_at_the_far_end_of_the_context(memory: ContextMemory) -> None:
    memory.append("x" * 2500)
    middle = memory.append("to be removed")
    memory.append("the end")
    memory.retract(middle, method="delete_and_shift")
    past, _ = plain_cache(memory.model, memory.token_ids)
    theirs = past.layers[0].keys
    assert (memory.past_key_values.layers[0].keys - theirs).abs().max() <= 1e-5 * theirs.abs().max()


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 10000.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 128,
        "factor": 32.0,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_shift_under_every_rope_type(rope: str) -> None:
    changes = {"original_max_position_embeddings": 128} if rope == "longrope" else {}
    name = "phi3" if rope == "longrope" else "llama"
    model = build(tiny_config(name, rope_parameters=ROPES[rope], **changes))
    memory = ContextMemory(model, tiny_tokenizer())
    segments = filled(memory)
    memory.retract(segments[1], method="delete_and_shift")
    past, _ = plain_cache(model, memory.token_ids)
    theirs = past.layers[0].keys
    assert (memory.past_key_values.layers[0].keys - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_partial_rotary_is_shifted_right() -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = build(tiny_config("phi3", rope_parameters=parameters, partial_rotary_factor=0.5))
    memory = ContextMemory(model, tiny_tokenizer())
    segments = filled(memory)
    memory.retract(segments[0], method="delete_and_shift")
    past, _ = plain_cache(model, memory.token_ids)
    assert (memory.past_key_values.layers[0].keys - past.layers[0].keys).abs().max() <= 1e-5 * past.layers[
        0
    ].keys.abs().max()


@pytest.mark.parametrize("architecture", ["gpt2", "cohere"])
def test_models_whose_keys_cannot_be_moved_refuse_to_shift_and_still_recompute(architecture: str) -> None:
    """GPT-2 learns positions, Cohere interleaves its rotary dimensions: measured, not listed."""
    from transformers import AutoConfig

    if architecture == "gpt2":
        config = AutoConfig.for_model("gpt2", vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=512)
    else:
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = AutoConfig.for_model("cohere", vocab_size=300, num_key_value_heads=2, **shape)
    model = build(config)
    memory = ContextMemory(model, tiny_tokenizer())
    segments = filled(memory)
    before = snapshot(memory)
    for method in ("delete_and_shift", "suffix_repair"):
        with pytest.raises(UnsupportedEdit, match="cannot be moved"):
            memory.retract(segments[1], method=method)
    assert_unchanged(memory, before)
    memory.retract(segments[1], method="recompute")
    assert_equals_reference(memory)


def test_keys_turned_too_often_are_recomputed_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete_and_shift, "MAX_TURNS_FULL", 2)
    memory = ContextMemory(tiny_model("llama"), tiny_tokenizer())
    segments = [memory.append(text) for text in ("one ", "two ", "three ", "four")]
    reports = [memory.retract(segment, method="delete_and_shift") for segment in segments[:3]]
    assert [report.method for report in reports] == ["delete_and_shift", "delete_and_shift", "recompute"]
    assert "re-rotated 2 times" in reports[2].why and reports[2].guarantee == "exact"
    assert_equals_reference(memory)


def test_half_precision_shifts_stay_within_storage_error() -> None:
    model = build(tiny_config("llama")).to(torch.bfloat16)
    full = build(tiny_config("llama"))
    memory = ContextMemory(model, tiny_tokenizer())
    segments = [memory.append(f"segment number {i} ") for i in range(8)]
    for segment in segments[:6]:
        memory.retract(segment, method="delete_and_shift")
        half, _ = plain_cache(model, memory.token_ids)
        exact, _ = plain_cache(full, memory.token_ids)
        keys = memory.past_key_values.layers[0].keys.float()
        rounding = (half.layers[0].keys.float() - exact.layers[0].keys).abs().max()
        assert (keys - exact.layers[0].keys).abs().max() <= 2 * rounding


class TestTargets:
    def test_by_segment_id_key_list_and_filter(self, llama_memory: Callable[..., ContextMemory]) -> None:
        for name in ("segment", "id", "key", "list", "filter"):
            memory = llama_memory()
            memory.append("stays ")
            target = memory.append("goes ", key="k", source="s", metadata={"a": 1, "b": 2})
            memory.append("stays too")
            match name:
                case "filter":
                    report = memory.retract(source="s", metadata={"a": 1})
                case _:
                    report = memory.retract({"segment": target, "id": target.id, "key": "k", "list": [target]}[name])
            assert report.segments == (target.id,)
            assert [s.text for s in memory.segments()] == ["stays ", "stays too"]

    def test_retracting_twice_is_a_stated_no_op(self, llama_memory: Callable[..., ContextMemory]) -> None:
        memory = llama_memory()
        segment = memory.append("goes")
        memory.append("stays")
        memory.retract(segment)
        before = snapshot(memory)
        report = memory.retract(segment)
        assert (report.method, report.segments, report.tokens_removed) == ("none", (), 0)
        assert "already retracted" in report.why
        assert_unchanged(memory, before)

    @pytest.mark.parametrize("bad", ["nothing", 7, [], [3], object()])
    def test_unknown_targets(self, llama_memory: Callable[..., ContextMemory], bad: Any) -> None:
        memory = llama_memory()
        memory.append("text")
        before = snapshot(memory)
        with pytest.raises((SegmentNotFound, InvalidInput)):
            memory.retract(bad)
        assert_unchanged(memory, before)

    def test_a_segment_of_another_memory_is_unknown(self, llama_memory: Callable[..., ContextMemory]) -> None:
        memory, other = llama_memory(), llama_memory()
        memory.append("mine")
        foreign = other.append("theirs")
        with pytest.raises(SegmentNotFound):
            memory.retract(foreign)
        with pytest.raises(SegmentNotFound):
            memory.append("x", parents=[foreign])

    def test_no_target_and_empty_filters_never_mean_everything(
        self, llama_memory: Callable[..., ContextMemory]
    ) -> None:
        memory = llama_memory()
        memory.append("text")
        for empty in ({}, {"source": None}, {"metadata": {}}):
            with pytest.raises(InvalidInput, match="never means everything"):
                memory.retract(**empty)
        with pytest.raises(SegmentNotFound):
            memory.retract(source="nobody")

    def test_unknown_method(self, llama_memory: Callable[..., ContextMemory]) -> None:
        memory = llama_memory()
        segment = memory.append("text")
        with pytest.raises(InvalidInput, match="unknown method 'vanish'"):
            memory.retract(segment, method="vanish")
        with pytest.raises(InvalidInput):
            SuffixRepair(where="middle")


@pytest.mark.smollm2
@pytest.mark.parametrize("method", REMOVING)
def test_smollm2_methods(smol: ContextMemory, method: str) -> None:
    segments = [smol.append(text * 6) for text in TEXTS]
    report = smol.retract(segments[1], method=method)
    if report.guarantee == "exact":
        assert_equals_reference(smol, "So what is left?")
    past, _ = plain_cache(smol.model, smol.token_ids)
    if method not in ("mask", "kveraser", "refill"):
        theirs = past.layers[0].keys
        assert (smol.past_key_values.layers[0].keys - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    smol.settle()
    assert_equals_reference(smol, "So what is left?")
    assert reference(smol.model, smol.token_ids).shape == smol.logits().shape
