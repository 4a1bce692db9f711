"""A decoder of transformers and a perceptron, as PyTorch computes them and after one call of `gemmkit.torch.accelerate`:
`python -m bench.models --out bench/results`, which writes models.json and networks.json.

| work | what is timed |
|---|---|
| prefill | transformers' Llama of bfloat16, `LAYERS` layers of 4096 / 14336 with 32 heads over 8: a prompt's last logits |
| decode | the same: a token of each sequence behind `CONTEXT` others |
| decode, 4 bits | the same with weights of 4 bits in groups of 128; peers have them as bfloat16, or as PyTorch's int4 |
| train | the same decoder: cross entropy, backward, AdamW (fused) of 4 x 2048 tokens |
| perceptron | 784 - 4096 - 4096 - 10, GELU: cross entropy, backward, SGD; in bfloat16, or float32 under autocast |
| BERT, RoBERTa, DistilBERT, GPT-2, T5 encoder | transformers' base networks: 32 sequences of 384 words, no padding |

A row is the fastest of ours over the fastest of PyTorch's among eager and ``torch.compile``, both in CUDA graphs; a row with
"eager" compares both launched by the host without a compiler, one with "compiled" both compiled. ``us`` has all times.
Of the networks, "unfused" is PyTorch with transformers' "eager" attention, the peer of Graphene's Fig. 15, in a graph;
"attention alone" puts gemmkit's attention into that network and nothing else, as the paper does; "backend" compares
``torch.compile(backend="gemmkit")`` with Inductor.
Results are compared before anything is timed; of training the losses of `STEPS` steps from the same parameters (``losses``).
All take turns in one run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import gemmkit.torch
from bench import report
from bench.turns import elapsed

LAYERS, CONTEXT, STEPS, TURNS = 4, 2048, 20, 7
TARGET_US = 20_000.0                   # of a turn
WORST_LOGIT, WORST_LOSS = 0.1, 0.02    # of the largest logit; of a loss
WORST_STATE = 2.0                      # of PyTorch's own error of the hidden states
Call = Callable[[], Any]


class Sizes(NamedTuple):
    """Of a decoder."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    words: int = 32000
    layers: int = LAYERS


TINY = Sizes(64, 96, 4, 2, 80, 1)


def decoder(sizes: Sizes, device: str) -> Any:
    """transformers' Llama with drawn weights, of bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    conf = LlamaConfig(hidden_size=sizes.hidden, intermediate_size=sizes.inner, num_attention_heads=sizes.heads,
                       num_key_value_heads=sizes.kv_heads, vocab_size=sizes.words, num_hidden_layers=sizes.layers,
                       max_position_embeddings=8192, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(conf).bfloat16().eval()


class Cache:
    """Keys and values in place, ``at`` of them there: what a decode step of a fixed length needs of transformers' caches."""

    def __init__(self, sizes: Sizes, batch: int, at: int, device: str):
        shape = sizes.layers, batch, sizes.kv_heads, at + 8, sizes.hidden // sizes.heads
        drawn = torch.Generator(device=device).manual_seed(3)
        self.k, self.v = (torch.randn(shape, device=device, dtype=torch.bfloat16, generator=drawn) for _ in range(2))
        self.at, self.places = at, torch.arange(at, at + 1, device=device)

    def update(self, k: Any, v: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        end = self.at + 1
        self.k[layer].index_copy_(2, self.places, k)   # as transformers' static cache: compilers write it in place
        self.v[layer].index_copy_(2, self.places, v)
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]


def logits(model: Any, ids: Any, cache: Any = None, every: bool = False) -> Any:
    """transformers' own layers one after the other, without padding; of the last place, or of every one."""
    at = cache.at if cache is not None else 0
    x = model.model.embed_tokens(ids)
    around = model.model.rotary_emb(x, torch.arange(at, at + ids.shape[1], device=ids.device)[None])
    for layer in model.model.layers:
        x = layer(x, position_embeddings=around, past_key_values=cache, attention_mask=None)
        x = x[0] if isinstance(x, tuple) else x
    x = model.model.norm(x)
    return model.lm_head(x if every else x[:, -1:])


def perceptron(width: int, device: str, dtype: Any) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(784, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU(),
                               torch.nn.Linear(width, 10)).to(device, dtype)


class Int4(torch.nn.Module):
    """The product of a `gemmkit.torch.QuantisedLinear` by PyTorch's own kernel for 4 bits."""

    def __init__(self, layer: Any):
        super().__init__()
        size = layer.dequantised().unflatten(1, (-1, layer.group)) / layer.scales.float().T[:, :, None] + 8
        integers = size.round().to(torch.uint8).flatten(1)
        self.group, on_cpu = layer.group, integers.device.type == "cpu"
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu if on_cpu else torch.ops.aten._convert_weight_to_int4pack
        self.multiply = torch.ops.aten._weight_int4pack_mm_for_cpu if on_cpu else torch.ops.aten._weight_int4pack_mm
        given = integers.int() if on_cpu else integers[:, ::2] << 4 | integers[:, 1::2]
        self.register_buffer("weight", pack(given.contiguous(), 8))
        self.register_buffer("scales", torch.stack((layer.scales, torch.zeros_like(layer.scales)), -1).bfloat16())

    def forward(self, x: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.multiply(rows, self.weight, self.group, self.scales).unflatten(0, x.shape[:-1])


def packed(sizes: Sizes, device: str) -> dict[str, Any]:
    """A decoder whose layers have drawn weights of 4 bits: as bfloat16, by PyTorch's int4, and by gemmkit."""
    plain = decoder(sizes, device).requires_grad_(False)
    drawn = torch.Generator(device=device).manual_seed(4)
    named = {name: m for name, m in plain.named_modules() if isinstance(m, torch.nn.Linear)}
    layers, int4 = {}, {}
    for name, m in named.items():
        group = 128 if m.in_features % 128 == 0 else 32
        layer = gemmkit.torch.QuantisedLinear(m.in_features, m.out_features, 4, group, False, device=device)
        words = layer.words.random_(-2**31, 2**31 - 1, generator=drawn)
        # (-8 becomes 0, so that the mean is 0: the sums of rows with another mean decide the logits, by their signs alone.)
        words |= (~(words | words >> 1 | words >> 2 | words >> 3) & 0x11111111) << 3
        layer.scales.fill_(2.0**-8)
        m.weight.data = layer.dequantised().bfloat16()
        layers[name], int4[name] = layer, Int4(layer)
    found = {"torch": plain}
    for side, modules in (("int4", int4), ("ours", layers)):
        found[side] = model = copy.deepcopy(plain)
        for name, m in modules.items():
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, m)
    accelerated(found["ours"])
    return found


# -- times ------------------------------------------------------------------------------------------------------------

def captured(call: Call) -> Call:
    """A CUDA graph of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def timed(call: Call, count: int) -> float:
    """Microseconds a call, on the GPU. A trial without one is no measurement."""
    return elapsed(call, "cuda", count) if torch.cuda.is_available() else elapsed(call, "cpu", 1)


def in_turns(calls: dict[str, Call], turns: int) -> dict[str, float]:
    """The median of each call's turns, by its name."""
    counts = {}
    for name, call in calls.items():
        timed(call, 1)
        counts[name] = max(1, min(200, int(TARGET_US / max(1.0, timed(call, 2)))))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        for name in list(calls)[::1 if turn % 2 else -1]:
            found[name].append(timed(calls[name], counts[name]))
    return {name: statistics.median(taken) for name, taken in found.items()}


def rows_of(work: str, us: dict[str, float], error: float, m: int, k: int, dtype: str, **further: Any) -> list[Any]:
    """A row for each way of launching that both have: names are "ours" or "torch", and " compiled", " graph" behind."""
    ways = [("", True, [" graph", " compiled graph"]), (", compiled", False, [" compiled"]), (", eager", False, [""])]
    pairs = [(label, graph, [f"ours{s}" for s in suffixes], [f"torch{s}" for s in suffixes])
             for label, graph, suffixes in ways]
    return compared(work, us, error, m, k, dtype, pairs, **further)


def compared(work: str, us: dict[str, float], error: float, m: int, k: int, dtype: str,
             pairs: Sequence[tuple[str, bool, Sequence[str], Sequence[str]]], **further: Any) -> list[Any]:
    """A row for each pair of ways, of which there are times: what the row is called behind ``work``, whether its ways are
    CUDA graphs, gemmkit's ways and PyTorch's, whose fastest count."""
    found = []
    for label, graph, of_ours, of_theirs in pairs:
        ours, theirs = ({name: us[name] for name in names if name in us} for names in (of_ours, of_theirs))
        if not theirs or not ours:
            continue
        peer, best = min(theirs, key=theirs.__getitem__), min(ours, key=ours.__getitem__)
        ratio = theirs[peer] / ours[best]
        print(f"{work + label:42} {ours[best]:10.0f} us ({best}), {peer} {theirs[peer]:10.0f} us, ratio {ratio:.3f}",
              flush=True)
        found.append(dict(work=work + label, dtype=dtype, m=m, n=k, k=k, layout="nt", ours_us=round(ours[best], 1),
                          peer=f"PyTorch{peer.removeprefix('torch')}", peer_us=round(theirs[peer], 1), ratio=round(ratio, 4),
                          error=error, graph=graph, group="networks" if "network" in further else "models", ours=best,
                          us={name: round(t, 1) for name, t in us.items()}, **further))
    return found


# -- inference --------------------------------------------------------------------------------------------------------

def inference(pair: dict[str, Any], sizes: Sizes, work: str, batch: int, tokens: int, context: int,
              options: Any) -> list[Any]:
    """Rows of a prompt, or of a token behind ``context`` others."""
    device = options.device
    ids = torch.randint(0, sizes.words, (batch, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    cache = Cache(sizes, batch, context, device) if context else None
    calls: dict[str, Call] = {}
    with torch.no_grad():
        exact: Any = None
        worst = 0.0
        for side, model in pair.items():
            def step(model: Any = model) -> Any:
                return logits(model, ids, cache)

            ways = {"": step}
            if options.compile:
                torch._dynamo.reset()
                ways[" compiled"] = torch.compile(step, dynamic=False, backend=options.backend)
            for suffix, call in ways.items():
                found = call().float()
                exact = found if exact is None else exact
                off = float((found - exact).abs().max() / exact.abs().max())
                worst = max(worst, off)
                if not off <= WORST_LOGIT:
                    raise ValueError(f"{work}: logits of {side}{suffix} differ by {off:.3g} of the largest from PyTorch's")
                calls[side + suffix] = call
                if options.device == "cuda":
                    calls[f"{side}{suffix} graph"] = captured(call)
        us = in_turns(calls, options.turns)
    rows, width = batch * tokens, sizes.hidden
    found = rows_of(work, us, worst, rows, width, "bfloat16")
    if "int4" in pair:
        ours, theirs = ([f"{side}{s}" for s in (" graph", " compiled graph")] for side in ("ours", "int4"))
        found += compared(work, us, worst, rows, width, "bfloat16", [(", of PyTorch's int4", True, ours, theirs)])
    return found


# -- networks ---------------------------------------------------------------------------------------------------------

#: Names of transformers' classes and configurations, and what the latter say beside their defaults, the base networks'.
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertModel", "BertConfig", {}), "RoBERTa": ("RobertaModel", "RobertaConfig", {"vocab_size": 50265}),
    "DistilBERT": ("DistilBertModel", "DistilBertConfig", {}), "GPT-2": ("GPT2Model", "GPT2Config", {"use_cache": False}),
    "T5 encoder": ("T5EncoderModel", "T5Config", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12})}
_SMALL = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, dim=64, n_layers=1,
              n_heads=4, hidden_dim=96, n_embd=64, n_layer=1, n_head=4, d_model=64, d_kv=16, d_ff=96, num_layers=1,
              num_heads=4, vocab_size=80, bos_token_id=1, eos_token_id=2)
SEQUENCES, WORDS = 32, 384
#: Rows of a network: gemmkit's ways, and PyTorch's.
_OURS, _THEIRS = ("ours graph", "backend graph"), ("torch graph", "torch compiled graph")
WAYS = [("", True, _OURS, _THEIRS),
        (", attention alone", True, ("attention graph",), ("unfused graph",)),
        (", backend", True, ("backend graph",), ("torch compiled graph",)), (", eager", False, ("ours",), ("torch",))]


def network(name: str, tiny: bool, device: str, attention: str = "sdpa") -> Any:
    """A network of transformers with drawn weights, of float16. T5 is of bfloat16: of float16 transformers looks for
    infinite elements behind each layer, by a copy that no CUDA graph takes."""
    import transformers

    kind, config, said = NETWORKS[name]
    own = getattr(transformers, config)
    takes = own().to_dict() | own.attribute_map
    conf = own(**said | ({key: value for key, value in _SMALL.items() if key in takes} if tiny else {}))
    torch.manual_seed(0)
    with torch.device(device):
        made = getattr(transformers, kind)._from_config(conf, attn_implementation=attention)
    return made.to(torch.bfloat16 if "T5" in name else torch.float16).eval().requires_grad_(False)


def states(model: Any, words: Any) -> Any:
    """The last hidden states of a network, by transformers' own layers one after the other. The whole model's call builds
    masks where nothing is masked if it is in a CUDA graph (5.17)."""
    kind, at = type(model).__name__, torch.arange(words.shape[1], device=words.device)
    more: dict[str, Any] = {}
    if kind.startswith("GPT2"):
        x, layers, after = model.wte(words) + model.wpe(at), model.h, model.ln_f
        if model.config._attn_implementation == "eager":                   # which sees what it is not told to hide
            hidden = torch.full((len(at), len(at)), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)
            more["attention_mask"] = hidden.triu(1)[None, None]
    elif kind.startswith("T5"):
        x, layers, after = model.shared(words), model.encoder.block, model.encoder.final_layer_norm
    else:
        encoder = model.transformer if kind.startswith("Distil") else model.encoder
        x, layers, after = model.embeddings(words), encoder.layer, None
    for layer in layers:
        found = layer(x, **more)
        x = found[0] if isinstance(found, tuple) else found
        if kind.startswith("T5"):                                          # the first layer's bias is that of all
            more["position_bias"] = next(y for y in found[1:] if y is not None)
    return x if after is None else after(x)


def network_rows(name: str, options: Any) -> list[Any]:
    """Rows of a network's forward pass. Raises ValueError where hidden states are off."""
    device = options.device
    batch, count = (2, 9) if options.tiny else (SEQUENCES, WORDS)
    models = {way: network(name, options.tiny, device, "eager" if way == "unfused" else "sdpa")
              for way in ("unfused", "torch", "attention", "ours")}
    gemmkit.torch.accelerate(models["attention"], parts=("attention",))
    accelerated(models["ours"])
    words = torch.randint(3, 80, (batch, count), generator=torch.Generator().manual_seed(1)).to(device)

    def call(model: Any) -> Call:
        return lambda: states(model, words)

    ways = {way: call(model) for way, model in models.items()}
    if options.compile:
        ways["torch compiled"] = torch.compile(call(models["torch"]), dynamic=False, backend=options.backend)
        ways["backend"] = torch.compile(call(models["torch"]), dynamic=False, backend="gemmkit")
    calls: dict[str, Call] = {}
    worst = own = 0.0
    with torch.no_grad():
        exact = call(network(name, options.tiny, device, "eager").float())()
        for way, one in ways.items():
            if way in ("torch compiled", "backend"):
                torch._dynamo.reset()
            off = float((one().float() - exact).norm() / exact.norm())
            own = off if way == "unfused" else own
            if not off <= WORST_STATE * own:
                raise ValueError(f"{name}: hidden states of {way} are off by {off:.3g} of float32's, PyTorch's by {own:.3g}")
            worst = max(worst, off if way in ("ours", "attention", "backend") else 0.0)
            calls[way] = one
            if device == "cuda":
                calls[f"{way} graph"] = captured(one)
        us = in_turns(calls, options.turns)
    width = int(exact.shape[-1])
    dtype = "bfloat16" if "T5" in name else "float16"
    return compared(f"{name} {batch} x {count}", us, worst, batch * count, width, dtype, WAYS, network=name)


# -- training ---------------------------------------------------------------------------------------------------------

class Training:
    """A model, its optimiser, and a step of it."""

    def __init__(self, model: Any, optimiser: Callable[[Any], Any], loss: Callable[..., Any], cast: bool, device: str):
        self.model, self.optimiser, self.loss = model, optimiser(model.parameters()), loss
        self.around: Any = (lambda: torch.autocast(device, dtype=torch.bfloat16)) if cast else contextlib.nullcontext

    def step(self, *batch: Any) -> Any:
        self.optimiser.zero_grad(set_to_none=True)
        with self.around():
            loss = self.loss(self.model, *batch)
        loss.backward()
        self.optimiser.step()
        return loss.detach()


def training(make: Callable[[], Any], optimiser: Callable[[Any], Any], loss: Callable[..., Any], batches: Sequence[Any],
             work: str, rows: int, width: int, cast: bool, options: Any) -> list[Any]:
    """Rows of a step. Losses of all are compared first, step by step."""
    calls: dict[str, Call] = {}
    losses: dict[str, list[float]] = {}
    for side in ("torch", "ours"):
        for suffix in ("", " compiled") if options.compile else ("",):
            model = make()
            if side == "ours":
                accelerated(model)
            taken = loss
            if suffix:
                torch._dynamo.reset()
                taken = torch.compile(loss, dynamic=False, backend=options.backend)
            run = Training(model, optimiser, taken, cast, options.device)
            losses[side + suffix] = [float(x) for x in [run.step(*batches[n % len(batches)]) for n in range(options.steps)]]
            calls[side + suffix] = lambda run=run: run.step(*batches[0])          # type: ignore[misc]
    worst = max(abs(x - y) / abs(y) for name in losses for x, y in zip(losses[name], losses["torch"]))
    if not worst <= WORST_LOSS:
        raise ValueError(f"{work}: losses differ by {worst:.3g}: {losses}")
    last = {name: round(x[-1], 5) for name, x in losses.items()}
    return rows_of(work, in_turns(calls, options.turns), worst, rows, width, "float32" if cast else "bfloat16", losses=last,
                   first_loss=round(losses["torch"][0], 5))


def of_tokens(model: Any, ids: Any, wanted: Any) -> Any:
    return F.cross_entropy(logits(model, ids, every=True).float().flatten(0, 1), wanted.flatten())


def of_classes(model: Any, x: Any, wanted: Any) -> Any:
    return F.cross_entropy(model(x).float(), wanted)


def sequences(sizes: Sizes, batch: int, tokens: int, device: str) -> list[Any]:
    """Batches with something to learn: every other word follows from the one before."""
    drawn = torch.Generator().manual_seed(1)
    follow = torch.randperm(sizes.words, generator=drawn)
    found = []
    for _ in range(4):
        ids = torch.randint(0, min(500, sizes.words), (batch, tokens + 1), generator=drawn)
        behind = follow[ids[:, :-1:2]]
        ids[:, 1::2] = behind[:, :ids[:, 1::2].shape[1]]
        found.append((ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)))
    return found


def pictures(rows: int, device: str, dtype: Any) -> list[Any]:
    drawn = torch.Generator().manual_seed(1)
    to = torch.randn(784, 10, generator=drawn)
    inputs = [torch.randn(rows, 784, generator=drawn) for _ in range(4)]
    return [(x.to(device, dtype), (x @ to).argmax(1).to(device)) for x in inputs]


# -- the bench --------------------------------------------------------------------------------------------------------

def accelerated(model: Any) -> Any:
    """The model, by gemmkit. Raises RuntimeError, with the report, where a layer of a known kind was left."""
    found = gemmkit.torch.accelerate(model)
    known = ("Linear", "Norm", "MLP", "attention", "Conv1D", "Output", "Intermediate", "FFN", "DecoderLayer")
    left = [x for x in found.left if any(word in x.kind for word in known) and x.why != "computes by gemmkit already"]
    if left or not found.replaced:
        raise RuntimeError(f"accelerate left {len(left)} layers:\n{found}")
    return model


def works(options: Any) -> list[tuple[str, Callable[[], list[Any]]]]:
    """Each work's name, and what gives its rows."""
    sizes = TINY if options.tiny else Sizes()
    device = options.device
    pair: dict[str, Any] = {}
    kept: dict[str, dict[str, Any]] = {}

    def both() -> dict[str, Any]:
        if not pair:
            pair["torch"] = decoder(sizes, device).requires_grad_(False)
            pair["ours"] = accelerated(copy.deepcopy(pair["torch"]))
        return pair

    def infer(work: str, batch: int, tokens: int, context: int) -> tuple[str, Callable[[], list[Any]]]:
        return work, lambda: inference(both(), sizes, work, batch, tokens, context, options)

    found = []
    for batch in (2,) if options.tiny else (1, 8, 64):
        found.append(infer(f"decode {batch}", batch, 1, 20 if options.tiny else CONTEXT))
    batch, tokens = (2, 8) if options.tiny else (4, 2048)

    def step_of_decoder() -> list[Any]:
        pair.clear()                                   # whose memory is needed
        kept.clear()
        return training(lambda: decoder(sizes, device), lambda p: torch.optim.AdamW(p, lr=1e-4, fused=device == "cuda"),
                        of_tokens, sequences(sizes, batch, tokens, device), f"train {batch} x {tokens}", batch * tokens,
                        sizes.hidden, False, options)

    for batch_of_four in (2,) if options.tiny else (1, 8):
        def four(batch: int = batch_of_four) -> list[Any]:
            if "packed" not in kept:
                kept["packed"] = packed(sizes, device)
            context = 20 if options.tiny else CONTEXT
            return inference(kept["packed"], sizes, f"decode {batch}, 4 bits", batch, 1, context, options)

        found.append((f"decode {batch_of_four}, 4 bits", four))
    for rows in (16,) if options.tiny else (2048, 8192):
        for cast in (False, True):
            def step_of_perceptron(rows: int = rows, cast: bool = cast) -> list[Any]:
                dtype, width = torch.float32 if cast else torch.bfloat16, 32 if options.tiny else 4096
                return training(lambda: perceptron(width, device, dtype), lambda p: torch.optim.SGD(p, lr=0.01), of_classes,
                                pictures(rows, device, dtype), f"perceptron {rows}{', autocast' if cast else ''}", rows,
                                width, cast, options)

            found.append((f"perceptron {rows}{', autocast' if cast else ''}", step_of_perceptron))
    for few, many in ((1, 9),) if options.tiny else ((1, 2048), (4, 512)):
        found.append(infer(f"prefill {few} x {many}", few, many, 0))
    found.append((f"train {batch} x {tokens}", step_of_decoder))
    found += [(name, lambda name=name: network_rows(name, options)) for name in NETWORKS]      # type: ignore[misc]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__.splitlines()[0])
    made.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    made.add_argument("--only", default="", metavar="REGEX", help="works whose name matches")
    made.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    made.add_argument("--backend", default="inductor", help="torch.compile's")
    made.add_argument("--tiny", action="store_true", help="tiny sizes, for a trial")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a trial in the emulator")
    made.add_argument("--steps", type=int, default=STEPS, help="of training before it is timed")
    made.add_argument("--turns", type=int, default=TURNS)
    made.add_argument("--limit", type=float, default=3000.0, metavar="SECONDS", help="no work begins later")
    options = made.parse_args(arguments)
    begun, rows, status = time.monotonic(), [], 0
    with gemmkit.emulate() if options.device == "cpu" else contextlib.nullcontext():
        for name, compute in works(options):
            if not re.search(options.only, name):
                continue
            if time.monotonic() - begun > options.limit:
                print(f"{name}: not measured, the time is over", flush=True)
                status = 1
                continue
            try:
                rows += compute()
            except (ValueError, RuntimeError, TypeError) as error:     # a row is missing; the others are measured
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                status = 1
            device = torch.cuda.get_device_name() if options.device == "cuda" else "emulator"
            for group in ("models", "networks"):
                own = [row for row in rows if row["group"] == group]
                if own:
                    report.write(report.document(group, own, device), report.results_path(group, options.out))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
