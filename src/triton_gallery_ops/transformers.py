"""The package's ops in a model of Hugging Face's transformers library.

    from triton_gallery_ops.transformers import patch, unpatch

    print(patch(model))  # what was replaced by which op, what was left and why

``patch`` changes one model, and nothing of the library's: norms, rotary
position embeddings, gated units, experts, attention and the loss compute with
the package's ops. Weights and their names stay, so checkpoints, ``generate``
and training loops go on working. ``unpatch`` undoes it.

Differences that a patched model has on purpose:

- In training mode and with ``labels``, a model for causal language modeling
  computes the loss from the hidden states, and its ``logits`` are None.
  Calling backward twice for one loss raises RuntimeError.
- With a causal mask, padding attends to nothing. In the library, padding at the
  right attends to the tokens before it. Nothing else depends on that.
- There are no second derivatives.
- Without gradients, and unless compiled, calls with few tokens, as in
  generating text, have PyTorch's own norms, units and attention, where that is
  one operator or two: such a call takes as long as its CPU time, and that of an
  op is longer.

The library's own attention computes dropout in training, several sequences
packed into a row, masks of four dimensions, position biases, and
``output_attentions``. It also computes sliding windows shorter than the keys if
the mask has gaps, or under ``torch.compile``, where its values cannot be read.
That attention is ``sdpa``, or ``eager`` for Gemma 2, as sdpa has no soft cap.
"""

import copy
import functools
import inspect
import math
import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
import triton
from torch import nn
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    CausalLMOutputWithPast,
)
from transformers.utils.import_utils import is_tracing

from triton_gallery_ops.flash_attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_with_lse,
)
from triton_gallery_ops.layer_norm import layer_norm
from triton_gallery_ops.linear_cross_entropy import linear_cross_entropy
from triton_gallery_ops.moe_layer import moe_layer
from triton_gallery_ops.rms_norm import rms_norm
from triton_gallery_ops.rope import rope
from triton_gallery_ops.swiglu import swiglu, swiglu_backward
from triton_gallery_ops.varlen_attention import varlen_attention

NAME = "triton_gallery"  # of the attention, in the library's registries
VERSIONS = (5, 17), (5, 24)  # of the library: the first and last that was tried
FAMILIES = (
    "bert",
    "gemma",
    "gemma2",
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "qwen3",
    "qwen3_moe",
)
# By the name of a layer's class
LAYERS = {
    "LayerNorm": "layer_norm",
    **{
        f"{m}{suffix}": op
        for m in ("Gemma", "Gemma2", "Llama", "Mistral", "Qwen3")
        for suffix, op in (
            ("RMSNorm", "rms_norm"),
            ("MLP", "swiglu"),
            ("Attention", "rope"),
            ("ForCausalLM", "linear_cross_entropy"),
        )
    },
    **{
        f"{m}{suffix}": op
        for m in ("Mixtral", "Qwen3Moe")
        for suffix, op in (
            ("RMSNorm", "rms_norm"),
            ("MLP", "swiglu"),
            ("Experts", "moe_layer"),
            ("Attention", "rope"),
        )
    },
    "GPT2LMHeadModel": "linear_cross_entropy",
}
# Names of the library for what swiglu takes
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Classes that make the mask of their layers from the positions of tokens. Not
# Gemma 2: its soft cap needs a packing in place of a mask.
MODELS = (
    "GPT2Model",
    "GemmaModel",
    "LlamaModel",
    "MistralModel",
    "MixtralModel",
    "Qwen3Model",
    "Qwen3MoeModel",
)
ATTENTION = (
    "BertCrossAttention",
    "BertSelfAttention",
    "GPT2Attention",
    "Gemma2Attention",
    "GemmaAttention",
    "LlamaAttention",
    "MistralAttention",
    "MixtralAttention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
)
# Of attention: what the library takes, and the ops do not have
OPTIONS = "position_bias", "head_mask"
ROW = 8192  # elements of a row that the norms take in every dtype
HEAD = 256  # the largest head that the attentions take
FEW = 256  # rows up to which the CPU time of a call decides
KEYS = 2**24  # elements of keys up to which it does so in attention


@dataclass
class Report:
    """What ``patch`` did: print it."""

    model: str
    replaced: dict[str, int] = field(default_factory=dict)  # by op: how many
    left: dict[str, str] = field(default_factory=dict)  # by layer: why

    def __str__(self) -> str:
        """Return a line for each op, and one for each kind of layer left."""
        lines = [f"{self.model}:"]
        lines += [f"  {op}: {n} replaced" for op, n in self.replaced.items()]
        lines += [f"  {what}: left, {why}" for what, why in self.left.items()]
        return "\n".join(lines)


# All layers are replaced in one way: a layer's class becomes a subclass with
# another forward. Unlike a forward that is set on the layer itself, this goes
# through deepcopy and pickle, and is easy to recognize and to undo.
class _Patched(nn.Module):
    def __reduce_ex__(self, protocol):
        base, op = type(self).__mro__[2], type(self)._op
        return _new_layer, (base, op), self.__dict__


def _new_layer(base, op):
    cls = _patched_class(base, op)
    return cls.__new__(cls)


@functools.cache
def _patched_class(base, op):
    """Return a subclass of a layer's class that computes with an op."""
    make = FORWARDS[op]
    names = {
        "forward": functools.wraps(base.forward)(make(base)),
        "_op": op,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (_Patched, base), names)


def _one_dtype(x, weight):
    """Return whether a norm takes both: autocast gives them one dtype."""
    return x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)


def _few(x):
    """Return whether a call with x takes as long as its CPU time.

    A call that a CUDA graph captures goes the way of the call before it, which
    warmed up: otherwise an op would be compiled during the capture.
    """
    # Under torch.compile as well: it fuses PyTorch's operators, not ops.
    return (
        not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and x.numel() <= FEW * x.shape[-1]
    )


def _forward_rms_norm(self, hidden_states):
    x, eps = hidden_states, self.variance_epsilon
    if not _one_dtype(x, self.weight):
        return super(_Patched, self).forward(x)
    if _few(x):
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, eps)
    return rms_norm(x, self.weight, eps)


def _forward_gemma_norm(self, x):
    return rms_norm(x, self.weight, self.eps, offset=1.0)


def _forward_layer_norm(self, input):
    if not _one_dtype(input, self.weight) or _few(input):
        return super(_Patched, self).forward(input)
    return layer_norm(input, self.weight, self.bias, self.eps)


def _activation(config):
    """Return the name that the library has for what a gate goes through."""
    if config.model_type == "gemma2":
        return config.hidden_activation
    return config.hidden_act


def _is_product(layer):
    """Return whether a layer multiplies by its weight, and does no more."""
    hooks = layer._forward_pre_hooks, layer._forward_hooks
    hooks = *hooks, layer._backward_pre_hooks, layer._backward_hooks
    return (
        type(layer) is nn.Linear
        and layer.bias is None
        and "forward" not in vars(layer)
        and not any(hooks)
    )


def _keeps(*tensors):
    """Return whether autograd keeps tensors for the backward as they are."""
    return (
        torch.is_grad_enabled()
        and any(t.requires_grad for t in tensors)
        and not torch.is_autocast_enabled(tensors[0].device.type)
    )


# Autograd would keep what swiglu returns, to multiply it in the backward. The
# backward computes it again: that reads two tensors and writes one.
class _Down(torch.autograd.Function):
    @staticmethod
    def forward(gate, up, weight, activation):
        return nn.functional.linear(swiglu(gate, up, activation), weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.activation = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        gate, up, weight = ctx.saved_tensors
        d_gate = d_up = d_weight = None
        if ctx.needs_input_grad[2]:
            h = swiglu(gate, up, ctx.activation).flatten(0, -2)
            d_weight = grad.flatten(0, -2).T @ h
            del h  # before there is more of its size
        if any(ctx.needs_input_grad[:2]):
            d = swiglu_backward(grad @ weight, gate, up, ctx.activation)
            d_gate, d_up = d.unbind()
        return d_gate, d_up, d_weight, None


def _forward_swiglu(self, x):
    if _few(x):
        return super(_Patched, self).forward(x)
    activation = ACTIVATIONS[_activation(self.config)]
    gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
    if _is_product(down) and _keeps(gate, up, down.weight):
        return _Down.apply(gate, up, down.weight, activation)
    return down(swiglu(gate, up, activation))


def _forward_experts(self, hidden_states, top_k_index, top_k_weights):
    routed = hidden_states, top_k_weights, top_k_index
    out = moe_layer(*routed, self.gate_up_proj, self.down_proj)
    return out.to(hidden_states.dtype)  # which autocast may have changed


def _apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate q and k, of (batch, heads, length, D), as the library does."""
    half = cos.shape[-1] // 2  # the other half is the same
    if cos.shape[0] == 1:  # all rows of the batch have these positions
        cos, sin = cos[0], sin[0]
    return rope(q, k, cos[..., :half], sin[..., :half])


def _forward_attention(base):
    """Return the layer's own forward, in which another function rotates."""
    forward = inspect.unwrap(base.forward)
    known = forward.__globals__ | {
        "apply_rotary_pos_emb": _apply_rotary_pos_emb
    }
    copied = types.FunctionType(
        forward.__code__,
        known,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _forward_model(base):
    """Return a forward that makes no mask where none is needed.

    Given no mask and no cache, the library looks at the positions, because a
    row may be several sequences packed, and under torch.compile, which cannot
    look, it makes a mask. But positions that the model counts itself are those
    of one sequence. The library passes a mask of four dimensions on as it is:
    one without elements stands for none.
    """
    names = list(inspect.signature(base.forward).parameters)[1:]

    def forward(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False), **kwargs)
        told = "attention_mask", "position_ids", "cache", "past_key_values"
        x = given.get("input_ids")
        x = given.get("inputs_embeds") if x is None else x
        window = getattr(self.config, "sliding_window", None)
        if (
            x is not None
            and all(given.get(name) is None for name in told)
            and self.config._attn_implementation == NAME
            and getattr(self.config, "is_causal", True)
            and (window is None or x.shape[1] <= window)
        ):
            given["attention_mask"] = x.new_empty((1, 1, 1, 0))
        return super(_Patched, self).forward(**given)

    return forward


def _forward_loss(base):
    """Return a forward that computes a loss without logits, in training."""
    names = list(inspect.signature(base.forward).parameters)[1:]

    def forward(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False), **kwargs)
        keep = given.get("logits_to_keep", 0)
        if (
            not self.training
            or given.get("labels") is None
            or not (isinstance(keep, int) and keep == 0)
            or self.loss_function is not ForCausalLMLoss
            or _head_reason(self) is not None
        ):
            return super(_Patched, self).forward(**given)
        labels = given.pop("labels")
        given.pop("logits_to_keep", None)
        as_dict = given.pop("return_dict", None)
        as_dict = self.config.return_dict if as_dict is None else as_dict
        outputs = self.base_model(**given, return_dict=True)
        fields = dict(outputs)
        hidden = fields.pop("last_hidden_state")
        head = self.get_output_embeddings()
        crossed = isinstance(outputs, BaseModelOutputWithPastAndCrossAttentions)
        kind = (
            CausalLMOutputWithCrossAttentions
            if crossed
            else CausalLMOutputWithPast
        )
        given["softcap"] = getattr(self.config, "final_logit_softcapping", None)
        result = kind(loss=_loss(hidden, head, labels, **given), **fields)
        return result if as_dict else result.to_tuple()

    return forward


def _loss(
    hidden,
    head,
    labels,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    softcap=None,
    **kwargs,
):
    """Return the loss as the library's ForCausalLMLoss does from logits."""
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
    options = {
        "ignore_index": ignore_index,
        "bias": head.bias,
        "softcap": softcap,
    }
    if num_items_in_batch is None:
        return linear_cross_entropy(hidden, head.weight, targets, **options)
    options["reduction"] = "sum"
    loss = linear_cross_entropy(hidden, head.weight, targets, **options)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


FORWARDS: dict[str, Callable[[type], Callable[..., Any]]] = {
    "layer_norm": lambda base: _forward_layer_norm,
    "linear_cross_entropy": _forward_loss,
    "model": _forward_model,
    "moe_layer": lambda base: _forward_experts,
    "rms_norm": lambda base: (
        _forward_gemma_norm
        if base.__name__ in ("GemmaRMSNorm", "Gemma2RMSNorm")
        else _forward_rms_norm
    ),
    "rope": _forward_attention,
    "swiglu": lambda base: _forward_swiglu,
}


# A model computes once what all its layers need to know of padding, caches and
# windows, in place of a mask: a tensor of int32, of four dimensions, because
# the library passes those on as they are. No shape depends on a mask's values.
# Where each row's keys follow one another, which reading the mask tells, it has
# three or four lines of batch + 1 numbers:
# - where each row's queries begin, and where its keys do
# - how many keys there are, and if causal, how many queries
# So varlen_attention takes the keys of a cache where they are. Otherwise, as
# under torch.compile, it has one line. Tokens are then sorted, those of row 0
# first, then those of row 1, and so on, and last all padding. The rows are
# sequences, and so are the queries that are padding, without keys, and the keys
# that are, without queries. The line has
# - where sequences of queries and of keys begin and end, batch + 3 each
# - the keys in this order, batch * keys
# - if causal: the queries in this order, batch * queries, and the way back
def _lines(valid, offset, queries):
    """Return the lines for rows whose keys follow one another.

    Args:
        valid: which keys are seen, (batch, keys)
        offset: of the queries among the keys, or None if all queries see all
            valid keys
        queries: how many there are
    """
    batch, keys = valid.shape
    row = torch.arange(batch + 1, device=valid.device)
    valid = pad(valid, (0, 0, 0, 1))
    start, count = valid.byte().argmax(1), valid.sum(1)
    if offset is None:
        lines = row * queries, row * keys + start, count
    else:
        first = (start - offset).clamp(min=0)
        real = (start + count - offset - first).clamp(min=0)
        lines = row * queries + first, row * keys + start, count, real
    return torch.stack(lines).int()[None, None]


def _pack(valid, real, queries):
    """Return the packing of keys and, if causal, of queries.

    Args:
        valid: which keys are seen, (batch, keys)
        real: which queries are no padding, (batch, queries), or None if all
            queries see all valid keys
        queries: how many there are
    """

    def order(flags):
        return torch.argsort((~flags).flatten().byte(), stable=True)

    def ends(counts, rest, total):
        return torch.cat((pad(counts.cumsum(0), (1, 0)), rest, total))

    total_q = valid.new_full((1,), valid.shape[0] * queries, dtype=torch.int64)
    total_k = torch.full_like(total_q, valid.numel())
    if real is None:
        counts, orders = torch.full_like(valid.sum(1), queries), []
    else:
        counts, orders = real.sum(1), [order(real)]
        orders.append(torch.argsort(orders[0]))
    packing = torch.cat(
        (
            ends(counts, total_q, total_q),
            ends(valid.sum(1), valid.sum().view(1), total_k),
            order(valid),
            *orders,
        )
    )
    return packing.int().view(1, 1, 1, -1)


def _unpack(packing, batch, queries, keys):
    """Return the parts of a packing, None for those that it lacks."""
    sizes = [batch + 3, batch + 3, batch * keys]
    packing = packing.view(-1)
    if packing.shape[0] == sum(sizes):
        return *packing.split(sizes), None, None
    return packing.split([*sizes, batch * queries, batch * queries])


def _dense(packing, batch, queries, keys, window):
    """Return the mask that a packing stands for, for the library's sdpa."""
    device = packing.device
    if packing.shape[2] > 1:
        starts_q, starts_k, count, *real = packing[0, 0, :, :batch, None]
        row = torch.arange(batch, device=device)[:, None]
        i = torch.arange(queries, device=device) + row * queries - starts_q
        j = torch.arange(keys, device=device) + row * keys - starts_k
        mask = ((j >= 0) & (j < count))[:, None].expand(-1, queries, -1)
        for length in real:
            distance = (i + count - length)[:, :, None] - j[:, None]
            mask = mask & (distance >= 0) & (distance < (window or math.inf))
            mask = mask & ((i >= 0) & (i < length))[:, :, None]
        return mask[:, None]
    ends_q, ends_k, order_k, order_q, back = _unpack(
        packing, batch, queries, keys
    )

    def places(ends, place, length):
        sequence = torch.searchsorted(ends, place, right=True) - 1
        left = ends[sequence + 1] - place  # up to the sequence's end
        return sequence.view(batch, length), left.view(batch, length)

    if order_q is None:
        back = torch.arange(batch * queries, device=device)
    sequence_q, left_q = places(ends_q, back.int(), queries)
    sequence_k, left_k = places(ends_k, torch.argsort(order_k).int(), keys)
    mask = sequence_q[:, :, None] == sequence_k[:, None, :]
    if order_q is not None:
        mask = mask & (left_k[:, None, :] >= left_q[:, :, None])
    return mask[:, None]


def _window(mask_function):
    """Return how many keys a query sees, or None if that is not certain."""

    def name(function):
        return getattr(function, "__qualname__", None)

    def given(function):
        return function.__closure__[0].cell_contents

    if name(mask_function) != "and_masks.<locals>.and_mask":
        return None
    overlay, *others = given(mask_function)
    known = name(overlay) == "sliding_window_overlay.<locals>.inner_mask"
    if not known or others != [causal_mask_function]:
        return None
    return given(overlay)


def _mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=causal_mask_function,
    attention_mask=None,
    local_size=None,
    allow_is_causal_skip=True,
    allow_is_bidirectional_skip=False,
    device="cpu",
    **kwargs,
):
    """Return None if no mask is needed, a packing, or sdpa's mask."""
    both = mask_function is bidirectional_mask_function
    # Where values cannot be read, nothing depends on them.
    tracing = is_tracing(attention_mask)
    window = None if tracing else _window(mask_function)
    # No window matters if it is longer than all keys.
    causal = (
        mask_function is causal_mask_function
        or window is not None
        or (
            allow_is_causal_skip
            and local_size is not None
            and kv_length < local_size
        )
    )
    plain = (
        allow_is_bidirectional_skip
        if both
        else causal and (allow_is_causal_skip or q_length == 1)
    )
    if plain and not tracing:
        q_offset = int(q_offset)
    known = not isinstance(q_offset, torch.Tensor)
    # A static cache has slots after the queries, which are not filled yet.
    filled = kv_length if both else q_offset + q_length - kv_offset
    valid = None
    if attention_mask is not None:
        end = kv_offset + kv_length
        valid = pad(attention_mask, (0, end - attention_mask.shape[-1]))
        valid = valid[:, kv_offset:end].bool()
    full, follow = attention_mask is None, attention_mask is None
    if plain and not tracing and attention_mask is not None:
        # A row's keys follow one another if none comes after a gap.
        first = valid[:, :filled]
        gaps = (first[:, :-1] & ~first[:, 1:]).sum(1) + first[:, -1]
        full, follow = torch.stack((first.all(), (gaps < 2).all())).tolist()
    windowed = window is not None and filled > window
    if (
        not plain
        or (kv_offset != 0 and window is None)
        or (windowed and not follow)
    ):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device,
            **kwargs,
        )
    # flash_attention has no soft cap, and gets what needs no mask.
    config = kwargs.get("config")
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if full and known and not windowed and not capped:
        at_start = q_length > 1 and q_offset == 0
        last = q_length == 1 and filled == kv_length
        if both or at_start or last:
            return None
    if valid is None:
        shape = batch_size, kv_length
        valid = torch.ones(shape, dtype=torch.bool, device=device)
    offset = None
    if not both:
        place = torch.arange(kv_length, device=device)
        valid = valid & (place < filled)
        if q_length > 1:
            offset = filled - q_length
        elif windowed:  # one query is the last one, and sees all that are left
            valid = valid & (place >= filled - window)
    if follow:
        return _lines(valid, offset, q_length)
    if offset is None:
        return _pack(valid, None, q_length)
    queries = torch.arange(q_length, device=device) + offset
    return _pack(valid, valid[:, queries], q_length)


def _additive(mask, query, keys):
    """Return a mask of bools, or a causal one for None, as eager adds it."""
    if mask is None:
        shape = query.shape[2], keys
        mask = torch.ones(shape, dtype=torch.bool, device=query.device)
        mask = mask.tril(keys if query.shape[2] == 1 else 0)
    if mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.where(mask, 0.0, lowest).to(query.dtype)


# The layer reads the result in another order, and so has a copy of it, which is
# kept for the backward. The attention's backward takes the copy, too.
class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, causal, scale):
        out, lse = flash_attention_with_lse(q, k, v, causal, scale)
        return out.transpose(1, 2).contiguous(), lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        q, k, v, out, lse = ctx.saved_tensors
        kept = q, k, v, out.transpose(1, 2), lse
        options = ctx.causal, ctx.scale
        d = flash_attention_backward(grad.transpose(1, 2), *kept, *options)
        return *d, None, None


# The backward of index_select adds, because an index may come twice. In an
# order none does, and the way back is another order.
class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(x, order, back):
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


def _attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    **kwargs,
):
    """Compute attention as the library's sdpa_attention_forward does."""
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if attention_mask is not None and attention_mask.numel() == 0:
        attention_mask = None  # _forward_model made it
    window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap")
    packing = None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        packing = attention_mask
    if (
        dropout > 0
        or (attention_mask is not None and packing is None)
        or (softcap is not None and packing is None)
        or kwargs.get("output_attentions")
        or any(kwargs.get(name) is not None for name in OPTIONS)
    ):
        if packing is not None:
            attention_mask = _dense(packing, batch, queries, keys, window)
        if softcap is not None:  # sdpa refuses it
            library = sys.modules[type(module).__module__]
            compute = library.eager_attention_forward
            attention_mask = _additive(attention_mask, query, keys)
        else:
            compute = sdpa_attention_forward
            kwargs["is_causal"] = is_causal
        return compute(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
    if packing is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        causal = queries > 1 and is_causal
        if causal and keys > queries:  # a static cache at its start
            key, value = key[:, :, :queries], value[:, :, :queries]
        if _few(query) and key.numel() <= KEYS:
            given = query, key, value, None
            options = {"is_causal": causal, "scaling": scaling}
            return sdpa_attention_forward(module, *given, **options)
        given = query, key, value, causal, scaling
        if _keeps(query, key, value):
            return _Attend.apply(*given)[0], None
        return flash_attention(*given).transpose(1, 2), None
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if packing.shape[2] > 1:
        starts_q, starts_k, count, *real = packing[0, 0]
        out = varlen_attention(
            q,
            k,
            v,
            starts_q,
            starts_k,
            queries,
            keys,
            causal=bool(real),
            scale=scaling,
            window_size=(window - 1 if real and window else -1, -1),
            softcap=softcap or 0.0,
            seqused_q=real[0][:-1] if real else None,
            seqused_k=count[:-1],
        )
        return out, None
    ends_q, ends_k, order_k, order_q, back = _unpack(
        packing, batch, queries, keys
    )
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    if order_q is not None and queries == keys:
        # Queries and keys are the same tokens, so their orders are the same.
        q, k, v = (_Ordered.apply(t, order_q, back) for t in (q, k, v))
    else:
        k, v = k.index_select(0, order_k), v.index_select(0, order_k)
        if order_q is not None:
            q = _Ordered.apply(q, order_q, back)
    ends = ends_q, ends_k, q.shape[0], k.shape[0]
    options = {"scale": scaling, "softcap": softcap or 0.0}
    out = varlen_attention(q, k, v, *ends, order_q is not None, **options)
    if order_q is not None:
        out = _Ordered.apply(out, back, order_q)
    return out.unflatten(0, (batch, queries)), None


def _head_reason(model):
    """Return why a model's loss needs its logits, or None."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__name__}"
    return None


def _reason(op, layer, config):
    """Return why a layer is left, or None."""
    if "forward" in vars(layer):
        return "another library has set a forward of its own"
    if op == "rope":
        names = inspect.unwrap(type(layer).forward).__code__.co_names
        if "apply_rotary_pos_emb" not in names:
            return "its forward is not that of the library"
    if op == "linear_cross_entropy":
        return _head_reason(layer)
    if op == "swiglu" and _activation(config) not in ACTIVATIONS:
        return f"its activation is {_activation(config)}"
    if op == "moe_layer" and ACTIVATIONS.get(config.hidden_act) != "silu":
        return f"its activation is {config.hidden_act}"
    if op in ("rms_norm", "layer_norm"):
        if layer.weight is None or getattr(layer, "bias", layer) is None:
            return "it lacks a weight or a bias"
        if layer.weight.numel() > ROW:
            return f"rows have more than {ROW} elements"
    return None


def _check(model):
    """Raise for a model that cannot be patched."""
    version = transformers.__version__
    first, last = VERSIONS
    if not first <= tuple(map(int, version.split(".")[:2])) <= last:
        tried = " to ".join(".".join(map(str, pair)) for pair in VERSIONS)
        raise RuntimeError(
            f"patch was tried with transformers {tried}, not with {version}"
        )
    kind = f"a {type(model).__name__}"
    if isinstance(model, transformers.PreTrainedModel):
        kind = model.config.model_type
    if kind not in FAMILIES:
        raise TypeError(
            f"patch takes models of transformers whose model_type is one of "
            f"{', '.join(FAMILIES)}, not {kind}"
        )
    if any(isinstance(layer, _Patched) for layer in model.modules()):
        raise ValueError("patch takes a model that is not patched: this one is")
    devices = {str(t.device) for t in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"patch takes a model on one device, not on {sorted(devices)}"
        )
    if "cpu" in devices and not triton.knobs.runtime.interpret:
        raise ValueError(
            "patch takes a model on a GPU, or on a CPU with Triton's "
            "interpreter: set TRITON_INTERPRET=1 before triton is imported"
        )


def _set_attention(model, name):
    """Have a model attend in another way, with a config of its own.

    Other models may share its config, and keep it as it is.
    """
    before = model.config
    config = copy.deepcopy(before)
    config._attn_implementation_internal = name
    for module in model.modules():
        if module.__dict__.get("config") is before:
            module.config = config


def patch(model: nn.Module) -> Report:
    """Have a model compute with the package's ops, and return what changed.

    Takes a model of the transformers library whose ``config.model_type`` is
    llama, qwen3, qwen3_moe, mistral, mixtral, gemma, gemma2, gpt2 or bert, with
    any head, on one GPU, or on the CPU in Triton's interpreter.
    ``model.config`` becomes a copy; all else about the model stays in its
    place. The module's docstring says what then differs, and what the library
    goes on computing.

    Raises TypeError for other models, RuntimeError for a version of the
    library that was not tried, and ValueError for a model on several devices,
    on meta, or on a CPU without the interpreter, and for one that is patched
    already. The model is then as it was.
    """
    _check(model)
    changed = cast(Any, model)
    config = changed.config
    report, counts = Report(type(model).__name__), Counter[str]()
    for layer in list(changed.modules()):
        name = type(layer).__name__
        op = LAYERS.get(name)
        if op is None:
            continue
        reason = _reason(op, layer, config)
        if reason is None:
            base: Any = type(layer)
            layer.__class__ = _patched_class(base, op)
            counts[op] += 1
        else:
            what = "loss" if op == "linear_cross_entropy" else name
            report.left[what] = reason
    changed._before_triton_gallery = config._attn_implementation
    head = getattr(config, "head_dim", None)
    head = head or config.hidden_size // config.num_attention_heads
    if head <= HEAD:
        _set_attention(model, NAME)
        layers = [(type(layer).__name__, layer) for layer in model.modules()]
        attentions = sum(name in ATTENTION for name, _ in layers)
        for name, layer in layers:
            if name in MODELS:
                base = type(layer)
                layer.__class__ = _patched_class(base, "model")
        counts["flash_attention, varlen_attention"] = attentions
    else:
        report.left["attention"] = f"heads have more than {HEAD} elements"
    report.replaced = dict(sorted(counts.items()))
    report.left |= _left(config)
    return report


def _left(config):
    """Return what the library goes on computing for a family, and why."""
    left = {}
    if config.model_type in ("bert", "gpt2"):
        left["MLP"] = "it is not gated"
    if config.model_type == "bert":
        left["loss"] = "the head is not a product alone"
    if config.model_type in ("mixtral", "qwen3_moe"):
        left["loss"] = "the library adds that of the router"
    names = "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"
    dropout = max(getattr(config, name, None) or 0 for name in names)
    if dropout > 0:
        left["attention in training"] = (
            f"the library computes its dropout, {dropout}"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None:
        left[f"attention from {window} keys on"] = (
            "the library computes its window under torch.compile, and where a "
            "mask has gaps"
        )
    return left


def unpatch(model: nn.Module) -> None:
    """Undo ``patch``; raises ValueError for a model that is not patched."""
    if not hasattr(model, "_before_triton_gallery"):
        raise ValueError("unpatch takes a model that is patched: this is not")
    for layer in model.modules():
        if isinstance(layer, _Patched):
            layer.__class__ = type(layer).__mro__[2]
    changed = cast(Any, model)
    _set_attention(model, changed._before_triton_gallery)
    del changed._before_triton_gallery


transformers.AttentionInterface.register(NAME, _attention)
transformers.AttentionMaskInterface.register(NAME, _mask)
