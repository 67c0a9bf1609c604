"""The ops in models of the transformers library: patched models compute what they did before."""

import copy
import functools
import importlib
import inspect
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from project import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triton_gallery.libraries import models

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
}
EXPERTS = ["mixtral", "qwen3_moe"]  # whose loss the library computes
CAUSAL = [kind for kind in CLASSES if kind not in ("bert", *EXPERTS)]
BATCH, LENGTH, VOCABULARY = 2, 9, 97
MASKS = {
    "none": None,
    "ones": [[1] * LENGTH, [1] * LENGTH],
    "left": [[1] * LENGTH, [0] * 3 + [1] * 6],
    "right": [[1] * LENGTH, [1] * 5 + [0] * 4],
    "gaps": [[1] * LENGTH, [0, 1, 1, 0, 1, 1, 0, 0, 1]],
}
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


class Called(TorchDispatchMode):
    """Collects which of the package's ops are called."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.ops = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an op of the package, and call it."""
        if func.namespace == "triton_gallery":
            self.ops.add(func._opname)
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made, and is no view."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and note the sizes of what has memory of its own."""
        results = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in results if isinstance(results, tuple) else [results]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.size = max(self.size, x.numel())
        return results


@pytest.fixture(scope="module")
def hf(interpreted: None) -> ModuleType:
    """Return the library, once the choice of the interpreter is made."""
    assert interpreted is None
    library = pytest.importorskip("transformers", reason="transformers is missing: it is in tests/requirements.txt")
    library.logging.set_verbosity_error()
    return library


@pytest.fixture(scope="module")
def ops(hf: ModuleType) -> Iterator[ModuleType]:
    """Yield the module under test, with which few tokens go to the ops, too."""
    assert hf
    module = importlib.import_module("triton_gallery_ops.transformers")
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(module, "FEW", 0)
        yield module


@pytest.fixture(scope="module")
def make(hf: ModuleType) -> Callable[..., Any]:
    """Return a function that makes a small random model, in eval mode, of a family or of a class."""

    def make(kind: str, name: str = "", **changes: Any) -> Any:
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        cls = getattr(module, name or CLASSES[kind])
        size = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        size |= {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        if kind == "gemma2":  # a cap that matters
            size |= {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
            size |= {"attn_implementation": "eager"}  # which all versions compute with the cap
        if kind == "gpt2":
            size |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        elif kind == "bert":
            size |= {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        else:
            size |= {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16}
        if kind in EXPERTS:
            size |= {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "output_router_logits": True}
            size |= {"num_local_experts" if kind == "mixtral" else "num_experts": 4}
        torch.manual_seed(0)
        model = cls(cls.config_class(**size | changes)).to(DEVICE).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms begin with ones, biases with zeros
                parameter += 0.1 * torch.randn_like(parameter)
        assert hf.__version__
        return model

    return make


@pytest.fixture(scope="module")
def pair(make: Callable[..., Any], ops: ModuleType) -> Callable[[str], tuple[Any, Any]]:
    """Return a function for a model of a family and a patched one with its weights, in eval mode."""

    @functools.cache
    def pair(kind: str) -> tuple[Any, Any]:
        model = make(kind)
        patched = copy.deepcopy(model)
        ops.patch(patched)
        return model, patched

    return pair


def tokens(seed: int = 1) -> torch.Tensor:
    """Return random tokens, none of them the padding's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator).to(DEVICE)


def mask_of(padding: str) -> torch.Tensor | None:
    return None if MASKS[padding] is None else torch.tensor(MASKS[padding], device=DEVICE)


def real_of(padding: str) -> torch.Tensor:
    return torch.tensor(MASKS[padding] or MASKS["ones"], dtype=torch.bool, device=DEVICE)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's gradients, and clear them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def ops_of(model: Any, **inputs: Any) -> set[str]:
    with Called() as called, torch.no_grad():
        model(**inputs)
    return called.ops


# What a model computes
@pytest.mark.parametrize(
    ("kind", "padding"),
    [("llama", "ones"), *((kind, padding) for kind in CLASSES for padding in MASKS if padding != "ones")],
)
def test_outputs_are_the_library_s(pair: Callable[[str], tuple[Any, Any]], kind: str, padding: str) -> None:
    inputs = {"input_ids": tokens(), "attention_mask": mask_of(padding), "output_hidden_states": True}
    with torch.no_grad():
        expected, actual = (model(**inputs) for model in pair(kind))
    assert type(actual) is type(expected)
    assert [*actual] == [*expected]
    real = real_of(padding)
    both = zip((actual.logits, *actual.hidden_states), (expected.logits, *expected.hidden_states), strict=True)
    for one, other in both:
        torch.testing.assert_close(one[real], other[real], **TIGHT)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_what_is_at_padding_does_not_matter(pair: Callable[[str], tuple[Any, Any]], kind: str, padding: str) -> None:
    real, model = real_of(padding), pair(kind)[1]
    with torch.no_grad():
        one, other = (
            model(input_ids=torch.where(real, tokens(), tokens(seed)), attention_mask=mask_of(padding)).logits[real]
            for seed in (1, 2)
        )
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_positions_that_differ_by_row(pair: Callable[[str], tuple[Any, Any]], kind: str) -> None:
    positions = torch.arange(LENGTH, device=DEVICE) + torch.tensor([[5], [0]], device=DEVICE)
    with torch.no_grad():
        one, other = (model(input_ids=tokens(), position_ids=positions).logits for model in pair(kind))
    torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "BertForSequenceClassification", "GPT2Model"])
def test_other_heads(make: Callable[..., Any], ops: ModuleType, name: str) -> None:
    kind = name.partition("For")[0].removesuffix("Model").lower()
    model = make(kind, name).train()
    patched = copy.deepcopy(model)
    ops.patch(patched)
    real = real_of("right")
    inputs = {"input_ids": tokens().where(real, 0), "attention_mask": mask_of("right")}
    if "For" in name:
        inputs["labels"] = torch.tensor([0, 1], device=DEVICE)
    outputs, found = [], []
    for each in (model, patched):
        output = each(**inputs)[0]
        outputs.append(output if output.ndim == 0 else output[real])
        outputs[-1].sin().sum().backward()
        found.append(gradients(each))
    torch.testing.assert_close(*outputs, **TIGHT)
    assert found[0].keys() == found[1].keys()
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-4, atol=1e-5, msg=key)


# The loss
def labels_of(padding: str) -> torch.Tensor:
    """Return labels, of which some are ignored: those at padding, and those that padding predicts."""
    labels, real = tokens(), real_of(padding)
    labels[0, :4] = -100
    labels[:, 1:] = labels[:, 1:].where(real[:, :-1], -100)
    return labels.where(real, -100)


@pytest.mark.parametrize(
    ("kind", "padding", "items"),
    # With eager, padding attends to padding, so that at the left it predicts something else.
    [(kind, "right" if kind == "gemma2" else "left", 7) for kind in CAUSAL]
    + [("llama", "none", None), ("llama", "gaps", None), ("gpt2", "right", torch.tensor(7))],
)
def test_loss_without_logits(
    pair: Callable[[str], tuple[Any, Any]], kind: str, padding: str, items: int | torch.Tensor | None
) -> None:
    inputs = {"input_ids": tokens(), "attention_mask": mask_of(padding), "labels": labels_of(padding)}
    inputs |= {} if items is None else {"num_items_in_batch": items}
    losses, found = [], []
    for model in pair(kind):
        with Called() as called:
            outputs = model.train()(**inputs)
            outputs.loss.backward()
        losses.append(outputs.loss)
        found.append(gradients(model))
        assert (outputs.logits is None) == ("linear_cross_entropy" in called.ops) == bool(called.ops)
        model.eval()
    assert outputs.logits is None
    torch.testing.assert_close(*losses, **TIGHT)
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", EXPERTS)
def test_loss_of_experts(pair: Callable[[str], tuple[Any, Any]], kind: str) -> None:
    """The loss is the library's, that of the router included, and so are all gradients; logits stay."""
    inputs = {"input_ids": tokens(), "attention_mask": mask_of("right"), "labels": labels_of("right")}
    losses, found = [], []
    for model in pair(kind):
        with Called() as called:
            outputs = model.train()(**inputs)
            outputs.loss.backward()
        losses.append((outputs.loss, outputs.aux_loss))
        found.append(gradients(model))
        assert ("moe_layer_with_activations" in called.ops) == ("moe_layer_backward" in called.ops) == bool(called.ops)
        assert outputs.logits is not None
        model.eval()
    assert called.ops
    torch.testing.assert_close(*losses, **TIGHT)
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-4, atol=1e-5, msg=name)


def test_experts_of_another_activation_are_left(make: Callable[..., Any], ops: ModuleType) -> None:
    report = ops.patch(make("mixtral", hidden_act="gelu"))
    assert report.left["MixtralExperts"] == "its activation is gelu"
    assert "moe_layer" not in report.replaced


def test_loss_of_other_calls(pair: Callable[[str], tuple[Any, Any]]) -> None:
    """Without targets, with shifted labels, as a tuple; with logits where they are asked for."""
    ids = tokens()
    nothing = torch.full_like(ids, -100)
    shifted = {"labels": ids, "shift_labels": ids.roll(1, 1)}
    calls = [{"labels": nothing, "num_items_in_batch": 3}, {"labels": nothing}, shifted]
    for call in calls:
        model, patched = (each.train()(input_ids=ids, **call) for each in pair("llama"))
        torch.testing.assert_close(patched.loss, model.loss, equal_nan=True, **TIGHT)
        assert patched.logits is None
    patched = pair("llama")[1]
    for options in ({"return_dict": False}, {}):
        patched.config.return_dict = bool(options)
        outputs = patched(ids, labels=ids, **options)
        assert type(outputs) is tuple
        assert outputs[0].ndim == 0
    assert patched(ids, labels=ids, return_dict=True).logits is None
    patched.config.return_dict = True
    assert patched(ids, labels=ids, logits_to_keep=LENGTH).logits is not None
    assert patched(ids).logits is not None
    assert patched.eval()(ids, labels=ids).logits is not None
    for model in pair("llama"):
        model.eval()


def test_training_keeps_no_tensor_twice(make: Callable[..., Any], ops: ModuleType) -> None:
    """What a gated unit multiplies is computed again, and attention's result is kept in one order alone."""
    model = make("llama").train()
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ops.patch(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens(), labels=tokens(), attention_mask=mask_of("ones"), use_cache=False).loss
    wide = [tensor for tensor in kept.values() if tensor.numel() == BATCH * LENGTH * 48]
    assert len(wide) == 2 * 2, "of two layers, the gate and what it multiplies"
    of_heads = [tensor for tensor in kept.values() if tensor.numel() == BATCH * LENGTH * 4 * 16]
    assert len(of_heads) == 2 * 2, "of two layers, the queries and the result"
    loss.backward()


@pytest.mark.parametrize("frozen", ["down_proj", "gate_proj", "q_proj", "none"])
def test_training_of_some_weights(pair: Callable[[str], tuple[Any, Any]], frozen: str) -> None:
    """A weight that is frozen gets no gradient, and the others' are the library's."""
    gradients = []
    for model in pair("llama"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        model.zero_grad()
        logits = model(tokens(), attention_mask=mask_of("ones"), use_cache=False).logits
        logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.requires_grad_(True)
        model.zero_grad()
    torch.testing.assert_close(*gradients, **TIGHT)


def test_hooks_of_the_last_product_are_called(make: Callable[..., Any], ops: ModuleType) -> None:
    """One that is set after `patch` gets the input and the output, as adapters want them."""
    model, called = make("llama").train(), []
    ops.patch(model)
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda module, inputs, output: called.append((*inputs[0].shape, *output.shape)))
    model(tokens(), use_cache=False).logits.sum().backward()
    assert called == [(BATCH, LENGTH, 48, BATCH, LENGTH, 32)]


def test_own_loss_function_gets_logits(make: Callable[..., Any], ops: ModuleType) -> None:
    model = make("llama").train()
    ops.patch(model)
    model.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 5
    assert model(tokens(), labels=tokens()).loss == 5


def test_gradient_checkpointing(make: Callable[..., Any], ops: ModuleType) -> None:
    model = make("llama").train()
    ops.patch(model)
    inputs = {"input_ids": tokens(), "attention_mask": mask_of("left"), "labels": labels_of("left")}
    model(**inputs).loss.backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    model(**inputs).loss.backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "bert"])
def test_autocast(pair: Callable[[str], tuple[Any, Any]], kind: str) -> None:
    inputs = {"input_ids": tokens(), "attention_mask": mask_of("left")}
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        expected, actual = (model(**inputs).logits for model in pair(kind))
    assert actual.dtype == expected.dtype
    real = real_of("left")
    torch.testing.assert_close(
        actual[real], expected[real], rtol=0.05, atol=0.05 * float(expected.detach().abs().max())
    )


def test_bfloat16_and_float32_norms(make: Callable[..., Any], ops: ModuleType) -> None:
    """Norms whose weights stay in float32 are left to the library in each call."""
    model = make("llama").bfloat16()
    model.model.norm.float()
    model.lm_head.float()
    expected = model(tokens()).logits
    ops.patch(model)
    torch.testing.assert_close(
        model(tokens()).logits, expected, rtol=0.1, atol=0.1 * float(expected.detach().abs().max())
    )


# Caches
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", CAUSAL)
def test_generate(pair: Callable[[str], tuple[Any, Any]], kind: str, cache: str) -> None:
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    for padding in ("ones", "left") if kind == "llama" else ("left",):
        with Called() as called:
            one, other = (m.generate(tokens(), attention_mask=mask_of(padding), **options) for m in pair(kind))
        assert torch.equal(one, other)
        assert one.shape == (BATCH, LENGTH + 3)
        assert called.ops & {"flash_attention", "varlen_attention_forward"}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static", "quantized"])
def test_generate_with_other_caches(pair: Callable[[str], tuple[Any, Any]], kind: str, cache: str) -> None:
    """Those that lie on the CPU, and one of float8; the other quantized ones want a library each."""
    if cache != "quantized" and DEVICE == "cpu":
        pytest.skip("transformers keeps such a cache with CUDA's streams")
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    if cache == "quantized":
        if not hasattr(importlib.import_module("transformers.cache_utils"), "Fp8QuantizedLayer"):
            pytest.skip("NOT TESTED: this version of transformers has no cache of float8")
        options["cache_config"] = {"backend": "fp8"}
    with Called() as called:
        one, other = (m.generate(tokens(), attention_mask=mask_of("left"), **options) for m in pair(kind))
    assert torch.equal(one, other)
    assert called.ops & {"flash_attention", "varlen_attention_forward"}


@pytest.mark.parametrize(("kind", "padding"), [("llama", "none"), ("llama", "left"), ("gpt2", "left")])
@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_several_queries_with_a_cache(
    pair: Callable[[str], tuple[Any, Any]], hf: ModuleType, kind: str, padding: str, cache: str
) -> None:
    """Queries see the cache's keys up to themselves, and no slot of a static cache that is not filled."""
    mask, logits = mask_of(padding), []
    names = inspect.signature(pair(kind)[0].forward).parameters
    argument = "cache" if "cache" in names else "past_key_values"  # in older versions
    for model in pair(kind):
        options = {"max_cache_len": 16} if cache == "StaticCache" else {}
        past = getattr(hf, cache)(config=model.config, **options)
        parts = []
        for start, stop in ((0, 5), (5, 8), (8, 9)):
            inputs = {"input_ids": tokens()[:, start:stop], "attention_mask": None if mask is None else mask[:, :stop]}
            with torch.no_grad():
                parts.append(model(**inputs, **{argument: past}).logits)
        logits.append(torch.cat(parts, dim=1)[real_of(padding)])
    torch.testing.assert_close(*logits, **TIGHT)


@pytest.mark.parametrize("kind", [kind for kind in CAUSAL if kind != "gemma2"])  # which has a soft cap
def test_positions_of_the_model_s_own_are_not_searched(
    pair: Callable[[str], tuple[Any, Any]], hf: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without a mask and a cache the library asks the positions whether rows are packed, with a wait for the GPU."""
    model, patched = pair(kind)
    expected = model(tokens(), use_cache=False).logits
    searched: list[Any] = []
    monkeypatch.setattr(hf.masking_utils, "find_packed_sequence_indices", searched.append)
    actual = patched(tokens(), use_cache=False).logits
    torch.testing.assert_close(actual, expected, **TIGHT)
    assert not searched
    patched(tokens(), position_ids=torch.arange(LENGTH, device=DEVICE)[None], use_cache=False)
    assert searched  # the caller's positions may be of packed rows


# What the library's sdpa computes
SDPA = {
    "dropout": ("gpt2", {"attn_pdrop": 0.5}, {"attention_mask": "left"}),
    "dropout, no padding": ("gpt2", {"attn_pdrop": 0.5}, {}),
    "dropout, both directions": ("bert", {"attention_probs_dropout_prob": 0.5}, {"attention_mask": "left"}),
    "window, dropout": ("mistral", {"sliding_window": 4, "attention_dropout": 0.5}, {"attention_mask": "left"}),
    "window, gaps": ("mistral", {"sliding_window": 4}, {"attention_mask": "gaps"}),
    "cap, dropout": ("gemma2", {"sliding_window": 4, "attention_dropout": 0.5}, {"attention_mask": "left"}),
    "cap, dropout, no padding": ("gemma2", {"attention_dropout": 0.5}, {}),
    "cap, attentions": ("gemma2", {}, {"attention_mask": "left", "output_attentions": True}),
    "mask": ("llama", {}, {"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril(1)}),
    "packed": ("llama", {"use_cache": False}, {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]] * 2)}),
    "attentions": ("llama", {}, {"attention_mask": "left", "output_attentions": True}),
}


@pytest.mark.parametrize("case", SDPA)
def test_what_goes_to_sdpa(make: Callable[..., Any], ops: ModuleType, case: str) -> None:
    kind, changes, inputs = SDPA[case]
    model = make(kind, **changes).train()
    patched = copy.deepcopy(model)
    ops.patch(patched)
    given = {name: mask_of(x) if isinstance(x, str) else x for name, x in inputs.items()}
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    logits = []
    with Called() as called, torch.no_grad():
        for each in (model, patched):
            torch.manual_seed(0)
            logits.append(each(input_ids=tokens(), **given).logits)
    real = real_of(inputs["attention_mask"] if isinstance(inputs.get("attention_mask"), str) else "none")
    torch.testing.assert_close(logits[0][real], logits[1][real], **TIGHT)
    assert not called.ops & {"flash_attention", "varlen_attention_forward"}
    assert called.ops


def test_window_that_is_longer_than_all_keys(make: Callable[..., Any], ops: ModuleType) -> None:
    model = make("mistral", sliding_window=LENGTH + 1)
    expected = model(tokens(), attention_mask=mask_of("left")).logits
    ops.patch(model)
    with Called() as called:
        actual = model(tokens(), attention_mask=mask_of("left")).logits
    torch.testing.assert_close(actual[real_of("left")], expected[real_of("left")], **TIGHT)
    assert "varlen_attention_forward" in called.ops


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "qwen3"])
def test_window(make: Callable[..., Any], ops: ModuleType, kind: str, padding: str) -> None:
    """Windows shorter than the keys, in all layers or in one of two: outputs and gradients."""
    changes = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    model = make(kind, sliding_window=4, **(changes if kind == "qwen3" else {})).train()
    patched = copy.deepcopy(model)
    ops.patch(patched)
    inputs = {"input_ids": tokens(), "attention_mask": mask_of(padding)}
    with Called() as called:
        logits = [each(**inputs).logits[real_of(padding)] for each in (model, patched)]
    torch.testing.assert_close(*logits, **TIGHT)
    assert "varlen_attention_forward" in called.ops
    for each in logits:
        each.sin().sum().backward()
    expected, actual = gradients(model), gradients(patched)
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-4, atol=1e-5 * max(1, float(expected[name].abs().max())), msg=name
        )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_generate_past_a_window(make: Callable[..., Any], ops: ModuleType, kind: str, cache: str) -> None:
    model = make(kind, sliding_window=6)
    patched = copy.deepcopy(model)
    ops.patch(patched)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    for length in (3, LENGTH):  # the window is full at some step, or at once
        inputs = {"inputs": tokens()[:, -length:], "attention_mask": torch.ones(BATCH, length, dtype=torch.int64)}
        inputs["attention_mask"][1, 0] = 0
        inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
        one, other = (each.generate(**inputs, **options) for each in (model, patched))
        assert torch.equal(one, other)


def test_cache_is_not_copied(ops: ModuleType) -> None:
    """One query, or several, take the keys of a static cache where they are."""
    key, value = torch.randn(2, BATCH, 2, 500, 16, device=DEVICE)
    valid = torch.zeros(BATCH, 500, dtype=torch.bool, device=DEVICE)
    valid[0, :20] = valid[1, 3:20] = True
    for queries in (1, 3):
        query = torch.randn(BATCH, 4, queries, 16, device=DEVICE)
        packing = ops._lines(valid, 20 - queries if queries > 1 else None, queries)
        with Largest() as largest, torch.no_grad():
            out, _ = ops._attention(torch.nn.Module(), query, key, value, packing)
        mask = ops._dense(packing, BATCH, queries, 500, None)
        right = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        torch.testing.assert_close(out.transpose(1, 2), right)
        assert largest.size < key[0].numel()


# What is replaced, and what stays
NORMS = dict.fromkeys(("qwen3", "llama", "mistral", "gemma", "gemma2", *EXPERTS), "rms_norm") | {
    "gpt2": "layer_norm",
    "bert": "layer_norm",
}


@pytest.mark.parametrize("kind", CLASSES)
def test_ops_are_called(pair: Callable[[str], tuple[Any, Any]], kind: str) -> None:
    model, patched = pair(kind)
    expected = {"varlen_attention_forward" if kind == "gemma2" else "flash_attention"}
    expected |= {NORMS[kind]} if kind in NORMS else set()
    expected |= {"rope"} if kind not in ("gpt2", "bert") else set()
    unit = "moe_layer_with_activations" if kind in EXPERTS else "swiglu"
    expected |= {unit} if kind not in ("gpt2", "bert") else set()
    assert ops_of(patched, input_ids=tokens()) == expected
    padded = expected - {"flash_attention"} | {"varlen_attention_forward"}
    assert ops_of(patched, input_ids=tokens(), attention_mask=mask_of("left")) == padded
    assert ops_of(model, input_ids=tokens()) == set()


@pytest.mark.parametrize("kind", CLASSES)
def test_few_tokens_go_to_pytorch(
    pair: Callable[[str], tuple[Any, Any]], ops: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, patched = pair(kind)
    rows = BATCH * LENGTH * model.config.num_attention_heads  # of heads: the most that a call has
    all_ops = ops_of(patched, input_ids=tokens())
    kept = {"rope", "moe_layer_with_activations", "varlen_attention_forward"}
    kept |= {"rms_norm"} if kind in ("gemma", "gemma2") else set()  # whose norm is ten operators in the library
    monkeypatch.setattr(ops, "FEW", rows)
    with torch.no_grad():
        assert ops_of(patched, input_ids=tokens()) == all_ops & kept
        torch.testing.assert_close(patched(tokens()).logits, model(tokens()).logits, **TIGHT)
        options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask_of("left")}
        if kind in CAUSAL:
            assert torch.equal(patched.generate(tokens(), **options), model.generate(tokens(), **options))
        with torch.autocast(DEVICE, torch.bfloat16):
            assert ops_of(patched, input_ids=tokens()) == all_ops
        monkeypatch.setattr(ops, "FEW", BATCH * LENGTH - 1)
        assert ops_of(patched, input_ids=tokens()) == all_ops
    monkeypatch.setattr(ops, "FEW", rows)
    with Called() as called:  # and gradients
        patched(tokens())
    assert {NORMS[kind], "varlen_attention_forward" if kind == "gemma2" else "flash_attention"} <= called.ops


def test_many_keys_go_to_the_op(
    pair: Callable[[str], tuple[Any, Any]], ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "FEW", 1000)
    monkeypatch.setattr(ops, "KEYS", 10)
    with torch.no_grad():
        assert ops_of(pair("llama")[1], input_ids=tokens()) == {"flash_attention", "rope"}


ATTENTION = {"flash_attention, varlen_attention": 2}
DECODER = ATTENTION | {"linear_cross_entropy": 1, "rope": 2}
GATED = DECODER | {"rms_norm": 5, "swiglu": 2}
OF_EXPERTS = {name: count for name, count in GATED.items() if name not in ("swiglu", "linear_cross_entropy")}
OF_EXPERTS |= {"moe_layer": 2}
REPORTS = {
    "llama": (GATED, []),
    "qwen3": (GATED | {"rms_norm": 9}, []),
    "mistral": (GATED, ["attention from 4096 keys on"]),
    "mixtral": (OF_EXPERTS, ["loss"]),
    "qwen3_moe": (OF_EXPERTS | {"rms_norm": 9}, ["loss"]),
    "gemma": (GATED, []),
    "gemma2": (GATED | {"rms_norm": 9}, ["attention from 4096 keys on"]),
    "gpt2": (ATTENTION | {"layer_norm": 5, "linear_cross_entropy": 1}, ["MLP"]),
    "bert": (ATTENTION | {"layer_norm": 6}, ["MLP", "loss"]),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_report(make: Callable[..., Any], ops: ModuleType, kind: str) -> None:
    report = ops.patch(make(kind))
    assert (report.replaced, [*report.left]) == REPORTS[kind]
    lines = str(report).splitlines()
    assert lines[0] == f"{CLASSES[kind]}:"
    assert lines[1] == "  flash_attention, varlen_attention: 2 replaced"
    assert len(lines) == 1 + len(report.replaced) + len(report.left)


def test_report_of_what_differs(make: Callable[..., Any], ops: ModuleType) -> None:
    report = ops.patch(make("llama", hidden_act="relu", head_dim=512, attention_dropout=0.1))
    assert report.left == {
        "LlamaMLP": "its activation is relu",
        "attention": "heads have more than 256 elements",
        "attention in training": "the library computes its dropout, 0.1",
    }


def test_head_with_a_bias(make: Callable[..., Any], ops: ModuleType) -> None:
    model = make("llama")
    model.lm_head = torch.nn.Linear(32, VOCABULARY, device=DEVICE)
    patched = copy.deepcopy(model).train()
    assert ops.patch(patched).left == {}
    inputs = {"input_ids": tokens(), "labels": tokens()}
    actual, expected = patched(**inputs).loss, model.train()(**inputs).loss
    torch.testing.assert_close(actual, expected, **TIGHT)
    actual.backward()
    expected.backward()
    torch.testing.assert_close(gradients(patched), gradients(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_activations(make: Callable[..., Any], ops: ModuleType, activation: str) -> None:
    model = make("gemma", hidden_act=activation)
    patched = copy.deepcopy(model)
    assert ops.patch(patched).replaced["swiglu"] == 2
    torch.testing.assert_close(patched(tokens()).logits, model(tokens()).logits, **TIGHT)


def test_layers_that_others_changed_are_left(
    make: Callable[..., Any], ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    model.model.norm.forward = torch.nn.Identity().forward
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", lambda self, hidden_states: hidden_states)
    report = ops.patch(model)
    assert report.left == {
        "LlamaRMSNorm": "another library has set a forward of its own",
        "LlamaAttention": "its forward is not that of the library",
    }
    assert (report.replaced["rms_norm"], "rope" in report.replaced) == (4, False)


def test_wide_heads_are_left(make: Callable[..., Any], ops: ModuleType) -> None:
    model = make("llama", head_dim=264, num_hidden_layers=1)
    expected = model(tokens(), attention_mask=mask_of("left")).logits
    ops.patch(model)
    actual = model(tokens(), attention_mask=mask_of("left")).logits
    torch.testing.assert_close(actual[real_of("left")], expected[real_of("left")], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CLASSES)
def test_unpatch_restores(make: Callable[..., Any], ops: ModuleType, kind: str) -> None:
    model = make(kind)
    classes, attention = [type(module) for module in model.modules()], model.config._attn_implementation
    attributes, state, config = {*vars(model)}, model.state_dict(), model.config.to_dict()
    inputs = {"input_ids": tokens(), "attention_mask": mask_of("left")}
    expected = model(**inputs).logits
    ops.patch(model)
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes, strict=True))
    assert [*model.state_dict()] == [*state]
    assert all(model.state_dict()[name].data_ptr() == weight.data_ptr() for name, weight in state.items())
    assert model.config._attn_implementation == ops.NAME
    model.config.use_cache = False  # what is changed meanwhile stays
    ops.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert {*vars(model)} == attributes
    assert model.config.to_dict() == config | {"use_cache": False}
    assert model.config._attn_implementation == attention
    assert ops_of(model, **inputs) == set()
    assert torch.equal(model(**inputs).logits, expected)
    ops.patch(model)


def test_models_that_share_a_config(make: Callable[..., Any], ops: ModuleType) -> None:
    one = make("llama")
    other = type(one)(one.config).to(DEVICE).eval()
    other.load_state_dict(one.state_dict())
    inputs = {"input_ids": tokens(), "attention_mask": mask_of("left")}
    expected = one(**inputs).logits
    ops.patch(other)
    assert ops_of(one, **inputs) == set()
    assert ops_of(other, **inputs)
    assert torch.equal(one(**inputs).logits, expected)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(make: Callable[..., Any], ops: ModuleType, again: Callable[[Any], Any]) -> None:
    model = make("llama")
    inputs = {"input_ids": tokens(), "attention_mask": mask_of("left")}
    ops.patch(model)
    expected = model(**inputs).logits
    other = again(model)
    assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
    assert torch.equal(other(**inputs).logits, expected)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    assert (other(**inputs).logits == 0).all()
    assert torch.equal(model(**inputs).logits, expected)
    ops.unpatch(other)
    assert ops_of(other, **inputs) == set()
    assert ops_of(model, **inputs)


def test_save_pretrained(make: Callable[..., Any], ops: ModuleType, tmp_path: Path) -> None:
    model = make("llama")
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path / "before")
    ops.patch(model)
    model.save_pretrained(tmp_path / "patched")
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("before", "patched")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes(), name
    loaded = type(model).from_pretrained(tmp_path / "patched").to(DEVICE)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(tokens()).logits, expected)


def test_signature_stays(make: Callable[..., Any], ops: ModuleType) -> None:
    """Trainers ask it which columns of a data set a model takes."""
    model = make("llama")
    before = inspect.signature(model.forward)
    ops.patch(model)
    assert inspect.signature(model.forward) == before


# Errors
def refuse(patch: Callable[[Any], Any], model: Any, error: type[Exception], message: str) -> None:
    """Check that a model is refused, and not changed."""
    before = [(type(module), {*vars(module)}) for module in model.modules()]
    config = getattr(model, "config", None)
    with pytest.raises(error, match=message):
        patch(model)
    assert [(type(module), {*vars(module)}) for module in model.modules()] == before
    assert getattr(model, "config", None) is config


def test_other_models_are_refused(make: Callable[..., Any], ops: ModuleType) -> None:
    known = "bert, gemma, gemma2, gpt2, llama, mistral, mixtral, qwen3, qwen3_moe"
    refuse(ops.patch, torch.nn.Linear(2, 2), TypeError, f"{known}, not a Linear")
    model = make("llama")
    model.config.model_type = "other"
    refuse(ops.patch, model, TypeError, f"{known}, not other")


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "5.25.0.dev0", "6.0.0"])
def test_other_versions_are_refused(
    make: Callable[..., Any], ops: ModuleType, hf: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    model = make("llama", num_hidden_layers=1)
    monkeypatch.setattr(hf, "__version__", version)
    refuse(ops.patch, model, RuntimeError, rf"tried with transformers 5\.17 to 5\.24, not with {version}")


def test_places_are_refused(make: Callable[..., Any], ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(ops.patch, make("llama").to("meta"), ValueError, r"one device, not on \['meta'\]")
    model = make("llama")
    model.lm_head.to("meta")
    refuse(ops.patch, model, ValueError, rf"one device, not on \['{DEVICE}.*', 'meta'\]")
    monkeypatch.setattr(ops.triton.knobs.runtime, "interpret", False)
    refuse(ops.patch, make("llama").cpu(), ValueError, "set TRITON_INTERPRET=1")


def test_twice_is_refused(make: Callable[..., Any], ops: ModuleType) -> None:
    model = make("llama")
    refuse(ops.unpatch, model, ValueError, "this is not")
    ops.patch(model)
    refuse(ops.patch, model, ValueError, "not patched: this one is")
    refuse(ops.patch, model.model, ValueError, "not patched: this one is")
    ops.unpatch(model)
    refuse(ops.unpatch, model, ValueError, "this is not")


# torch.compile: with tensors that are not there, on an H100 that is not there
GRAPHS = """
import torch
import triton
from compiled import compile_for_h100
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from triton_gallery_ops.transformers import patch

compile_for_h100()
SIZE = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4}
config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, **SIZE)
graphs, backward = [], []


def keep(module, inputs):
    graphs.append(module)
    return module


def keep_backward(module, inputs):
    backward.extend(str(node.target) for node in module.graph.nodes)
    return module


MANY, FEW = (300, 500, 1000), (8, 16, 30)
for masked, train, lengths in ((False, False, MANY), (True, True, MANY), (False, True, MANY), (False, False, FEW)):
    torch._dynamo.reset()
    graphs.clear()
    with FakeTensorMode(), torch.set_grad_enabled(lengths is MANY):
        model = LlamaForCausalLM(config).train(train)
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True  # else patch refuses a CPU
            patch(model)
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep_backward)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
        for length in lengths:
            ids = torch.zeros(2, length, dtype=torch.int64)
            inputs = {"attention_mask": torch.ones_like(ids)} if masked else {}
            if train:
                compiled(ids, labels=ids, use_cache=False, **inputs).loss.backward()
            else:
                compiled(ids, **inputs)
        names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
        adds = [name for name in backward if "index_add" in name or "index_put" in name]
        print(len(graphs), any("scaled_dot_product" in name for name in names), len(adds))
"""


def test_torch_compile_makes_one_graph(hf: ModuleType) -> None:
    assert hf
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    variables = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", GRAPHS], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.stdout == 3 * "1 False 0\n" + "1 True 0\n", done.stderr  # few tokens go to PyTorch


# `make models`
@pytest.mark.parametrize("work", ["train", "generate"])
def test_models_are_measured(hf: ModuleType, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """A tiny case is, as large ones on a GPU; its losses fall, and what is found can be sent."""
    assert hf
    asked: list[str] = []
    for name, value in {"ask": asked.append, "WARM": 1, "STEPS": 2, "TOKENS": 3, "CALLS": 2}.items():
        monkeypatch.setattr(models, name, value)
    case = models.Case(work, "tiny", 2, 12, "ours", False)
    measure = getattr(models, work)(case, models.build(case))
    assert asked == ["room"], "it says when it needs memory"
    found = measure()
    assert msgspec.json.decode(msgspec.json.encode(found), type=models.Measured) == found
    assert found.ms[0] > 0
    if work == "generate":
        assert (found.tokens, found.training) == (2 * 3, None)
        return
    first, second, third = found.training.losses
    assert first > second > third
    assert sum(found.training.profile.kinds.values()) > 0


class Made(TorchDispatchMode):
    """Notes the most elements that a tensor of each dtype had."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.most = Counter[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and note what it returns."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.most[tensor.dtype] = max(self.most[tensor.dtype], tensor.numel())
        return out


def test_models_are_made_in_their_dtype(hf: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight was of float32 before: it would take twice the memory that a case is given for its weights."""
    assert hf
    monkeypatch.setattr(models, "place", lambda: ("meta", torch.bfloat16))
    with Made() as made:
        model = models.build(models.Case("train", "tiny", 2, 12, "plain", False))
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert made.most[torch.bfloat16] == 97 * 64
    assert made.most[torch.float32] < 64


def test_compiled_model_asks_once_it_is_compiled(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward and backward are compiled before it asks for memory, and it asks once."""
    calls = []
    monkeypatch.setattr(models, "ask", calls.append)
    compiler = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(compiler, "compile_fx", lambda graph, inputs: calls.append("compiled") or graph.forward)
    model = make("llama").train()
    forward = models.compiled_early(model)
    for _ in range(2):
        forward(tokens(), labels=tokens(), attention_mask=mask_of("ones"), use_cache=False).loss.backward()
    assert calls == ["compiled", "room"]
