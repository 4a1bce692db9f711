"""`gemmkit.torch.KVCache`: decoding reads what was appended, wherever it lies; what does not fit is refused; graphs replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from gemmkit.torch import KVCache, accelerate  # noqa: E402
from gemmkit.torch import cache as CACHE  # noqa: E402
from gemmkit.torch.attention import attention_of_transformers  # noqa: E402
from tests.support.checks import functions_run  # noqa: E402
from tests.support.machines import on_devices  # noqa: E402

F = torch.nn.functional
BF16, F16 = torch.bfloat16, torch.float16
HEADS, SHARED, SIZE = 4, 2, 16
paged = pytest.mark.parametrize("page", [None, 8, 24])


def drawn(*shape: int, device: str = "cpu", dtype: Any = F16, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def cache_of(device: str, **more: Any) -> Any:
    """A poisoned one: what no sequence has is NaN, but values in its pages, which attention multiplies by 0."""
    made = KVCache(**{**dict(layers=2, batch=3, heads=SHARED, head_size=SIZE, capacity=40, dtype=F16, device=device), **more})
    made.keys.fill_(torch.nan)
    if made.table is not None:
        made.values.fill_(torch.nan)
    return made


def poison(cache: Any) -> None:
    """Values of pages that were free and are none any more become finite, as a page's are."""
    if cache.table is not None:
        for owned in cache._owned:
            for page in owned:
                rows = cache.values[:, page * cache.page:(page + 1) * cache.page]
                rows.nan_to_num_(nan=1000.0)


def exact(q: Any, k: list[Any], v: list[Any]) -> Any:
    """Attention of (heads, queries, size) to keys (heads, keys, size) of each sequence, in float64, the last query last."""
    found = []
    for one, keys, values in zip(q, k, v):
        queries, count = one.shape[1], keys.shape[1]
        wide = [x.double().repeat_interleave(HEADS // SHARED, 0) for x in (keys, values)]
        scores = one.double() @ wide[0].mT * SIZE ** -0.5
        seen = torch.arange(count, device=one.device) <= torch.arange(count - queries, count, device=one.device)[:, None]
        found.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ wide[1])
    return torch.stack(found)


def near(found: Any, wanted: Any, dtype: Any = F16) -> None:
    assert found.shape == wanted.shape and found.isfinite().all()
    assert ((found.double() - wanted).abs().max() <= (4e-3 if dtype == F16 else 2e-2) * max(1.0, float(wanted.abs().max())))


# -- decoding ---------------------------------------------------------------------------------------------------------------

@on_devices
@paged
@pytest.mark.parametrize("dtype", [F16, pytest.param(BF16, marks=pytest.mark.gpu)])
def test_decoding(page: int | None, dtype: Any, device: str) -> None:
    """Prompts of different lengths, then tokens, of two layers; poisoned pages; a sequence is replaced on the way."""
    cache = cache_of(device, page=page, dtype=dtype)
    held = [[[torch.empty(SHARED, 0, SIZE, device=device, dtype=dtype) for _ in range(3)] for _ in "kv"] for _ in range(2)]

    def append(tokens: int, counts: list[int] | None, seed: int) -> None:
        for layer in range(2):
            k, v = (drawn(3, SHARED, tokens, SIZE, device=device, dtype=dtype, seed=seed + 2 * layer + n) for n in range(2))
            for of, x in zip(held[layer], (k, v)):
                for b in range(3):
                    of[b] = torch.cat((of[b], x[b, :, :tokens if counts is None else counts[b]]), 1)
            given: Any = counts
            if counts is not None and seed % 2:
                given = torch.tensor(counts, device=device)
            cache.append(k, v, layer, counts=given if layer == 0 else None)
        poison(cache)

    append(11, [11, 3, 0], 10)
    append(5, [0, 2, 5], 21)
    for step in range(3):
        append(1, None, 40 + 10 * step)
        for layer in range(2):
            q = drawn(3, 1, HEADS, SIZE, device=device, dtype=dtype, seed=90 + step)
            near(gk.attention(q, **cache.arguments(layer)).transpose(1, 2), exact(q.transpose(1, 2), *held[layer]), dtype)
    assert cache.lengths.tolist() == [14, 8, 8]
    cache.reset([1])
    for of in held:
        for x in of:
            x[1] = x[1][:, :0]
    append(13, [1, 13, 2], 70)
    for layer in range(2):
        q, k, v = (drawn(3, heads, 2, SIZE, device=device, dtype=dtype, seed=heads + layer) for heads in (HEADS, SHARED, SHARED))
        found = cache.attend(q, k, v, layer)
        for of, x in zip(held[layer], (k, v)):
            of[:] = [torch.cat((y, x[b]), 1) for b, y in enumerate(of)]
        near(found, exact(q, *held[layer]), dtype)
    assert cache.lengths.tolist() == [17, 15, 12]


@on_devices
@paged
def test_cropped_and_reordered(page: int | None, device: str) -> None:
    cache = cache_of(device, page=page, layers=1)
    k, v = (drawn(3, SHARED, 9, SIZE, device=device, seed=n) for n in range(2))
    cache.append(k, v)
    poison(cache)
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([2, 2, 0], device=device))
    k, v = (x[[2, 2, 0], :, :7] for x in (k, v))
    q, more_k, more_v = (drawn(3, heads, 1, SIZE, device=device, seed=heads) for heads in (HEADS, SHARED, SHARED))
    near(cache.attend(q, more_k, more_v), exact(q, list(torch.cat((k, more_k), 2)), list(torch.cat((v, more_v), 2))))
    cache.reset()
    assert not cache.lengths.any() and not cache.most.any()
    near(cache.attend(q, more_k, more_v), exact(q, list(more_k), list(more_v)))


@on_devices
@paged
def test_captured(page: int | None, device: str) -> None:
    """Steps by a graph are those of the host, to the bit; what does not fit is refused at the call, and nothing is changed."""
    count, layers = (11, 2) if device == "cuda" else (2, 1)              # in the emulator there is no graph
    args = [tuple(drawn(3, heads, 1, SIZE, device=device, seed=10 * step + heads) for heads in (HEADS, SHARED, SHARED)) for step in range(count + 1)]
    found = []
    for is_captured in (False, True):
        cache = cache_of(device, page=page, capacity=6 + count, layers=layers)
        cache.values.nan_to_num_()
        for layer in range(layers):
            cache.append(*(drawn(3, SHARED, 6, SIZE, device=device, seed=n) for n in range(2)), layer, counts=[6, 1, 3] if layer == 0 else None)

        def step(q: Any, k: Any, v: Any, cache: Any = cache) -> Any:
            return torch.stack([cache.attend(q, k, v, layer) for layer in range(layers)])

        run = cache.captured(step) if is_captured else step
        found.append([run(*one).clone() for one in args[:count]])
        assert cache.lengths.tolist() == [6 + count, 1 + count, 3 + count] and cache.most.tolist() == [6 + count, 1 + count, 3 + count]
        with pytest.raises(ValueError, match=f"sequence 0 may have {6 + count} tokens; 1 more do not fit into a capacity of {6 + count}"):
            run(*args[count])
        assert cache.lengths.tolist() == [6 + count, 1 + count, 3 + count]
        cache.reset([0])
        assert run(*args[count]).isfinite().all()
    for one, other in zip(*found):
        assert torch.equal(one, other)


# -- transformers -----------------------------------------------------------------------------------------------------------

class Interface:
    """What transformers says of a module."""

    is_causal = True
    num_key_value_groups = HEADS // SHARED


@on_devices
@paged
def test_as_transformers_calls_it(page: int | None, device: str) -> None:
    """A prompt and tokens by the attention function that `accelerate` registers; without it, by views of what is there."""
    cache = cache_of(device, page=page, layers=1)
    k, v = ([torch.empty(SHARED, 0, SIZE, device=device, dtype=F16) for _ in range(3)] for _ in "kv")
    for step, tokens in enumerate((7, 1, 1)):
        assert cache.get_seq_length() == len(k[0][0]) and cache.get_mask_sizes(tokens, 0) == (len(k[0][0]) + tokens, 0)
        q, new_k, new_v = (drawn(3, heads, tokens, SIZE, device=device, seed=step + heads) for heads in (HEADS, SHARED, SHARED))
        stored = cache.update(new_k, new_v, 0, {"cache_position": None})
        poison(cache)
        k, v = ([torch.cat((x, y[b]), 1) for b, x in enumerate(of)] for of, y in ((k, new_k), (v, new_v)))
        with torch.no_grad():
            run: list[Any] = []
            names = functions_run(lambda q=q, stored=stored: run.append(attention_of_transformers(Interface, q, *stored, None)[0]))
        assert names
        near(run[0].transpose(1, 2), exact(q, k, v))
        assert stored[0].shape == (3, SHARED, len(k[0][0]), SIZE)
        if page is None:
            assert torch.equal(stored[0], torch.stack(k)) and torch.equal(stored[1], torch.stack(v))
        else:
            with pytest.raises(TypeError, match=r"lie in pages.*call gemmkit.torch.accelerate\(model\)"):
                F.scaled_dot_product_attention(q, *stored)
            for one, other in zip(stored[0]._gemmkit_stored.plain(), (k, v)):
                assert torch.equal(one, torch.stack(other))
    earlier = stored
    cache.update(new_k, new_v, 0)
    with pytest.raises(ValueError, match="read after tokens have been appended"):
        attention_of_transformers(Interface, q, *earlier, None)


def llama(device: str) -> Any:
    """Of drawn weights by which the first choice is 5 roundings of bfloat16 ahead of the second in all steps of `test_generate`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(27)
    conf = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                    num_key_value_heads=2, vocab_size=40, head_dim=8, max_position_embeddings=64, eos_token_id=None)
    return transformers.LlamaForCausalLM(conf).to(device, BF16).eval()


@on_devices
def test_generate(device: str) -> None:
    """Padded on the left or not: a model of PyTorch's writes the same tokens; by gemmkit's attention, too. Beams, between which
    roundings decide, are compared on the CPU."""
    model = llama(device)
    ids = torch.arange(14, device=device).view(2, 7) + 3
    mask = torch.ones_like(ids)
    padded = mask.clone()
    padded[0, :3] = 0
    ways: list[tuple[int, dict[str, Any]]] = [(2, dict(attention_mask=mask)), (2, dict(attention_mask=padded))]
    ways += [(4, dict(attention_mask=mask, num_beams=2))] if device == "cpu" else []

    def write(cache: Any, more: dict[str, Any]) -> Any:
        return model.generate(ids, past_key_values=cache, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, **more)

    with torch.no_grad():
        wanted = [write(None, more) for _, more in ways]
        for (batch, more), tokens in zip(ways, wanted):
            assert torch.equal(write(KVCache.of(model, batch=batch, capacity=16), more), tokens)
        accelerate(model, parts=("attention",))
        for (batch, more), tokens in zip(ways, wanted):
            for page in (None, 8):
                assert torch.equal(write(KVCache.of(model, batch=batch, capacity=16, page=page), more), tokens)
        with pytest.raises(ValueError, match="do not fit into a capacity of 10"):
            write(KVCache.of(model, batch=2, capacity=10), ways[0][1])
        with pytest.raises(ValueError, match=r"k has shape \(2, 2, 7, 8\); \(3, 2, tokens, 8\) is needed"):
            write(KVCache.of(model, batch=3, capacity=16), ways[0][1])


@on_devices
@pytest.mark.parametrize("page", [None, 16])
def test_a_graph_of_a_model(page: int | None, device: str) -> None:
    """Logits of captured steps are the model's own of the whole text; the last token that fits is the last that is taken."""
    model = llama(device)
    ids = (torch.arange(28, device=device) * 7 % 37 + 3).view(2, 14)
    with torch.no_grad():
        wanted = model(ids).logits
        accelerate(model, parts=("attention",))
        cache = KVCache.of(model, batch=2, capacity=14, page=page)

        def step(ids: Any) -> Any:
            at = cache.lengths[:1] + torch.arange(ids.shape[1], device=device)
            return model(ids, past_key_values=cache, use_cache=True, position_ids=at[None], cache_position=at).logits

        run, found = cache.captured(step), [step(ids[:, :7])]
        for n in range(7, 14):
            found.append(run(ids[:, n:n + 1]).clone())
        assert ((torch.cat(found, 1).float() - wanted.float()).abs().max() <= 0.02 * wanted.float().abs().max())
        with pytest.raises(ValueError, match="do not fit into a capacity of 14"):
            run(ids[:, :1])


# -- what is refused --------------------------------------------------------------------------------------------------------

def kv(tokens: int = 1, batch: int = 3, heads: int = SHARED, size: int = SIZE, dtype: Any = F16) -> Any:
    return (torch.ones(batch, heads, tokens, size, dtype=dtype),) * 2


def appended(cache: Any, *layers: int, tokens: int = 1) -> Any:
    for layer in layers:
        cache.append(*kv(tokens), layer)
    return cache


def ragged() -> Any:
    cache = cache_of("cpu")
    for layer in range(2):
        cache.append(*kv(3), layer, counts=[1, 3, 2] if layer == 0 else None)
    return cache


def reserved() -> Any:
    cache = appended(cache_of("cpu"), 0, 1, tokens=4)
    cache.reserve(5)
    return cache


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: cache_of("cpu", dtype=torch.float32), TypeError, "dtype=torch.float32"),
    (lambda: cache_of("cpu", head_size=20), ValueError, "head_size=20: a multiple of 8"),
    (lambda: cache_of("cpu", batch=0), ValueError, "batch=0: a whole number above 0"),
    (lambda: cache_of("cpu", page=12), ValueError, "page=12: a multiple of 8 rows"),
    (lambda: cache_of("cpu", pages=4), ValueError, "pages=4 is given without page="),
    (lambda: appended(cache_of("cpu"), 0, tokens=41), ValueError, "41 more do not fit into a capacity of 40"),
    (lambda: appended(cache_of("cpu", page=8, pages=3), 0, tokens=9), ValueError, "6 pages are needed and 3 of 3 are free"),
    (lambda: appended(cache_of("cpu"), 0, 1, 1), ValueError, "layer 1 appends a second time before layer 0"),
    (lambda: appended(cache_of("cpu"), 0, 0, 1), ValueError, "layer 1 has appended nothing in an earlier step"),
    (lambda: appended(appended(cache_of("cpu"), 0), 1, tokens=2), ValueError, "layer 1 appends 2 tokens, and layer 0 appended 1"),
    (lambda: appended(cache_of("cpu"), 2), ValueError, "layer=2: the cache has 2 layers"),
    (lambda: cache_of("cpu").append(*kv(batch=2)), ValueError, r"k has shape \(2, 2, 1, 16\); \(3, 2, tokens, 16\) is needed"),
    (lambda: cache_of("cpu").append(*kv(dtype=BF16)), TypeError, "k has dtype torch.bfloat16 and the cache has torch.float16"),
    (lambda: cache_of("cpu").append(kv()[0], kv(2)[0]), ValueError, "v has 2 tokens and k has 1"),
    (lambda: cache_of("cpu").append(kv()[0].requires_grad_(), kv()[0]), ValueError, "k requires a gradient"),
    (lambda: cache_of("cpu").append(*kv(2), counts=[1, 3, 0]), ValueError, "3 whole numbers from 0 to 2 are needed"),
    (lambda: cache_of("cpu").append(*kv(2), counts=torch.ones(2)), ValueError, "counts is tensor"),
    (lambda: cache_of("cpu").append(*kv(), layout="nbhd"), ValueError, "layout='nbhd'"),
    (lambda: cache_of("cpu").crop(3), ValueError, "the number of tokens to forget is needed, negated"),
    (lambda: cache_of("cpu").crop(-1), ValueError, "sequence 0 has 0 tokens at most"),
    (lambda: cache_of("cpu").reset([3]), ValueError, "sequences names 3"),
    (lambda: cache_of("cpu").reorder_cache(torch.zeros(2)), ValueError, "beam_idx has shape"),
    (lambda: ragged().get_seq_length(), ValueError, "sequences have from 1 to 3 tokens"),
    (lambda: ragged().update(*kv(), 0), ValueError, "sequences have from 2 to 4 tokens"),
    (lambda: ragged().reorder_cache(torch.arange(3)), ValueError, "sequences have from 1 to 3 tokens"),
    (lambda: reserved().get_mask_sizes(1, 0), ValueError, "there are 9 at most"),
    (lambda: reserved().crop(-1), ValueError, "reset the cache first"),
    (lambda: cache_of("cpu").batch_repeat_interleave(2), ValueError, "make one for 6"),
])
def test_refused(call: Callable[[], Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_what_is_refused_changes_nothing() -> None:
    cache = appended(cache_of("cpu", page=8, pages=6), 0, 1, tokens=9)
    before = cache.lengths.clone(), cache.table.clone(), cache.most.copy()
    with pytest.raises(ValueError, match="pages are needed"):
        cache.append(*kv(9))
    assert torch.equal(cache.lengths, before[0]) and torch.equal(cache.table, before[1]) and (cache.most == before[2]).all()
    q = torch.ones(3, HEADS, 1, SIZE, dtype=F16)
    for given, more in ((q.float(), {}), (q[:2], {}), (q[:, :3], {}), (q[..., :8], {}), (q.clone().requires_grad_(), {}),
                        (q, {"mask": 1}), (q, {"score": 1}), (q, {"scale": "x"}), (q, {"scale": float("inf")})):
        with gk.emulate(), pytest.raises((TypeError, ValueError)):
            cache.attend(given, *kv(), **more)
    assert torch.equal(cache.lengths, before[0]) and (cache.most == before[2]).all()
    assert appended(cache, 0, 1, tokens=2).lengths.tolist() == [11] * 3


def test_a_token_beyond_the_capacity_is_at_no_row() -> None:
    """As a graph of the user's own might append it: the device's index is out of range."""
    for page in (None, 8):
        cache = appended(cache_of("cpu", page=page), 0, 1, tokens=40)
        cache.most[:] = 0
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)|index"):
            cache.append(*kv())


# -- caches of others -------------------------------------------------------------------------------------------------------

@on_devices
def test_two_writes_are_one_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys wait for values, and for nothing else that could see them."""
    launched: list[Any] = []
    monkeypatch.setattr(CACHE, "placed", lambda *args, own=CACHE.placed: (launched.append(args), own(*args)))
    k, v = drawn(2, 3, 2 * SHARED * SIZE, device=device).unflatten(2, (2, SHARED, SIZE)).permute(2, 0, 3, 1, 4)
    at, other = torch.tensor([4, 0, 8], device=device), torch.tensor([4, 0, 8], device=device)
    begun = drawn(2, SHARED, 9, SIZE, device=device, seed=1)

    def read(keys: Any, values: Any) -> Any:
        return keys.index_copy_(2, at, k).sum(), values.index_copy_(2, at, v)

    def written(keys: Any, values: Any) -> Any:
        keys[:, :].index_copy_(2, at, k)
        assert values.shape == keys.shape
        return values[None][0].index_copy_(2, at, v)

    def fails(keys: Any, values: Any) -> Any:
        keys.index_copy_(2, at, k)
        with pytest.raises((IndexError, RuntimeError)):
            values.index_copy_(2, at, v[:, :, :1])

    ways: list[tuple[Callable[[Any, Any], Any], int]] = [
        (written, 1), (read, 0), (fails, 0), (lambda x, y: x.index_copy_(2, at, k), 0),
        (lambda x, y: (x.index_copy_(2, at, k), y.index_copy_(2, other, v)), 0),
        (lambda x, y: (x.index_copy_(2, at, k), x.index_copy_(2, at, v)), 0),
        (lambda x, y: (x.index_copy_(2, at, k), x[:, :, at], y.index_copy_(2, at, v)), 0)]
    with torch.no_grad():
        for way, count in ways:
            keys, values, *wanted = (begun.clone() for _ in range(4))
            own = way(*wanted)
            versions, launched[:] = (keys._version, values._version), []
            with CACHE._Storing():
                found = way(keys, values)
            assert len(launched) == count and torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])
            assert keys._version > versions[0] and (values._version > versions[1] or not count)
            if way is read:
                assert torch.equal(found[0], own[0])
    if device == "cpu":                                    # on a GPU the kernel traps
        with pytest.raises(IndexError, match="no place of an array"), torch.no_grad(), CACHE._Storing():
            at += 1
            for x in (begun, begun.clone()):
                x.index_copy_(2, at, k)


class OwnCache:
    """A cache of a user's: it writes in place."""

    def __init__(self, device: str, size: int = 8):
        self.held = [torch.zeros(2, 2, 9, size, device=device, dtype=BF16) for _ in "kv"]
        self.at, self.seen = torch.zeros(1, dtype=torch.int64, device=device), 0

    def update(self, k: Any, v: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        for held, x in zip(self.held, (k, v)):
            held.index_copy_(2, self.at, x)
        self.seen += 1
        end = int(self.at) + 1
        return self.held[0][:, :, :end], self.held[1][:, :, :end]


@on_devices
def test_an_accelerated_layer_writes_a_cache(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own, which stays what it is to the layer; undone, the layer writes as before."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    conf = llama.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=40, head_dim=8)
    torch.manual_seed(0)
    model = llama.LlamaForCausalLM(conf).to(device, BF16).eval()
    launched: list[Any] = []
    monkeypatch.setattr(CACHE, "placed", lambda *args, own=CACHE.placed: (launched.append(args), own(*args)))

    def run() -> Any:
        layer, cache, x = model.model.layers[0], OwnCache(device), drawn(2, 1, 32, device=device, dtype=BF16)
        found = []
        for at in (0, 1):
            cache.at.fill_(at)
            around = model.model.rotary_emb(x, torch.tensor([[at]], device=device))
            y = layer(x, position_embeddings=around, past_key_values=cache, attention_mask=None)
            found.append(y[0] if isinstance(y, tuple) else y)
        assert cache.seen == 2
        return [*found, *cache.held]

    with torch.no_grad():
        wanted = run()
        report = accelerate(model)
        found = run()
        assert len(launched) == 2
        for one, other in zip(found, wanted):
            near(one, other.double(), BF16)
        report.undo()
        assert all(map(torch.equal, run(), wanted)) and len(launched) == 2


def test_a_stand_in_for_a_cache() -> None:
    """It is of the cache's class, and has all that this has."""
    class Listed(list):                                                       # type: ignore[type-arg]
        def update(self, x: Any) -> Any:
            return x, self

    cache = Listed((1, 2))
    made = CACHE.Written(cache)
    made.more = 3
    assert isinstance(made, Listed) and cache.more == made.more == 3 and [*made] == [1, 2] and made[1] == len(made) == 2
    assert made and not CACHE.Written(Listed()) and made.update(4) == (4, cache)

    def forward(module: Any, **given: Any) -> Any:
        return module, given["past_key_values"]

    assert CACHE.storing(forward, 5, (), {"past_key_values": cache})[1] is cache
    assert CACHE.storing(lambda module: module, 5, (), {}) == 5
