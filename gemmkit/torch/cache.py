"""``KVCache``: the keys and values of a decoder's sequences, on the device with their lengths.

    cache = gemmkit.torch.KVCache.of(model, batch=8, capacity=4096)
    text = model.generate(ids, past_key_values=cache)                # a model of transformers
    out = cache.attend(q, k, v, layer=0)                             # or a layer of your own
    step = cache.captured(lambda ids: model(ids, past_key_values=cache).logits.argmax(-1))

The cache owns the arrays that `gemmkit.attention` takes: keys, values, ``key_lengths`` and ``pages``. All that an append
needs is computed on the device, so that a captured graph appends at other places each time. The host counts what may have
been appended at most, and refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from gemmkit import programs as gp
from gemmkit.components import Component, Scalar
from gemmkit.functions.attention import check_rules
from gemmkit.lang.components import dataclass
from gemmkit.programs.decorated import program
from gemmkit.programs.values import Parameter
from gemmkit.ptx.special import trap
from gemmkit.torch.attention import CAUSAL, attention
from gemmkit.torch.product import NARROW, is_eager, is_here, records

_WARM = 2                              # calls of a step before it is captured


class KVCache:
    """Keys and values of ``batch`` sequences of at most ``capacity`` tokens.

    Args:
        layers: how many layers append.
        batch: how many sequences.
        heads: heads of keys and values; those of queries are a multiple.
        head_size: of keys; a multiple of 8 up to 256.
        capacity: tokens that a sequence may have.
        value_size: the head size of values; None takes head_size.
        page: rows of a page, a multiple of 8; None keeps each sequence in one piece.
        pages: how many pages there are of each layer; None takes as many as all sequences can fill.
        dtype: float16 or bfloat16.
        device: where it lies; None takes PyTorch's default.

    Attributes:
        lengths: (batch,) int64 on the device: the tokens of each sequence. The host never reads it.
        table: (batch, pages of a sequence) int32 on the device, -1 where a sequence has no page; None without pages.
        most: (batch,) of NumPy: the tokens that each sequence may have, as the host has counted.

    Raises ValueError for sizes that are none, TypeError for another dtype.

    The first layer that appends begins a step: `lengths` then count its tokens, and each other layer appends as many once.
    A graph that `captured` made counts at each call. The host cannot check one that you capture yourself: call `reserve`
    before you replay it, for a token beyond the capacity raises the device's assertion. The cache has no gradient.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> cache = gk.torch.KVCache(layers=1, batch=1, heads=1, head_size=64, capacity=16, dtype=torch.float16)
    >>> q = k = v = torch.ones(1, 1, 2, 64).half()
    >>> with gk.emulate():
    ...     cache.attend(q, k, v).shape
    torch.Size([1, 1, 2, 64])
    >>> cache.lengths.tolist()
    [2]
    """

    is_compileable = False                             # transformers' word: `generate` then compiles nothing by itself
    is_croppable = True
    is_initialized = True
    layer_class_to_replicate = None
    offloading = False

    def __init__(self, *, layers: int, batch: int, heads: int, head_size: int, capacity: int, value_size: int | None = None,
                 page: int | None = None, pages: int | None = None, dtype: torch.dtype = torch.bfloat16,
                 device: Any = None):
        if dtype not in NARROW:
            raise TypeError(f"dtype={dtype}: torch.float16 or torch.bfloat16 is needed")
        value_size = head_size if value_size is None else value_size
        given = dict(layers=layers, batch=batch, heads=heads, head_size=head_size, capacity=capacity, value_size=value_size,
                     page=8 if page is None else page, pages=1 if pages is None else pages)
        for name, number in given.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r}: a whole number above 0 is needed")
        for name in ("head_size", "value_size"):
            if given[name] % 8 or given[name] > 256:
                raise ValueError(f"{name}={given[name]}: a multiple of 8 up to 256 is needed")
        if given["page"] % 8:
            raise ValueError(f"page={page}: a multiple of 8 rows is needed")
        if pages is not None and page is None:
            raise ValueError(f"pages={pages} is given without page=; say how many rows a page has")
        self.batch, self.capacity, self.page, self.dtype = batch, capacity, page, dtype
        self.most = np.zeros(batch, np.int64)
        self._is_exact = True                          # whether `most` are the lengths
        each = 0 if page is None else -(-capacity // page)
        count = batch * capacity if page is None else (batch * each if pages is None else pages) * page
        with torch.inference_mode(False), torch.no_grad():       # so that it may be written in every mode
            # The row behind all others gets what nobody counts. Rows are zeros: attention multiplies them by 0.
            self.keys = torch.zeros(layers, count + 1, heads, head_size, dtype=dtype, device=device)
            self.values = torch.zeros(layers, count + 1, heads, value_size, dtype=dtype, device=device)
            self.device = self.keys.device
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.device)
            self.table = None if page is None else torch.full((batch, each), -1, dtype=torch.int32, device=self.device)
            self._first = torch.arange(batch, device=self.device)[:, None] * capacity
        self._free = list(range(0 if page is None else count // page))[::-1]
        self._owned: list[list[int]] = [[] for _ in range(batch)]
        self._step: _Step | None = None
        self._all, self._behind = {*range(layers)}, set[int]()           # layers, and those that a step went without
        self._in_graph = 0                             # tokens that graphs append, since somebody set it to 0

    @classmethod
    def of(cls, model: Any, *, batch: int, capacity: int, page: int | None = None, pages: int | None = None) -> KVCache:
        """A cache for a model of transformers: layers, heads, dtype and device are those of its configuration and of its
        parameters. Raises ValueError for a configuration that does not name them."""
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
        if not layers or not heads:
            raise ValueError(f"the configuration of {type(model).__name__} names no layers and heads; call KVCache(...)")
        like = next(model.parameters())
        return cls(layers=layers, batch=batch, capacity=capacity, page=page, pages=pages, dtype=like.dtype,
                   heads=getattr(config, "num_key_value_heads", None) or heads, device=like.device,
                   head_size=getattr(config, "head_dim", None) or config.hidden_size // heads)

    def __repr__(self) -> str:
        layers, _, heads, size = self.keys.shape
        paged = "" if self.page is None else f", page={self.page}"
        return (f"KVCache(layers={layers}, batch={self.batch}, heads={heads}, head_size={size}, capacity={self.capacity}"
                f"{paged})")

    # -- tokens -------------------------------------------------------------------------------------------------------

    def append(self, k: torch.Tensor, v: torch.Tensor, layer: int = 0, *, counts: Any = None, layout: str = "bhnd") -> None:
        """Append keys and values of a layer behind those of each sequence.

        Args:
            k: (batch, heads, tokens, head size) of the cache's dtype and device, or with ``layout="bnhd"`` (batch, tokens,
                heads, head size).
            v: the same with the values' head size.
            layer: which layer's they are.
            counts: (batch,) how many of the tokens each sequence has, the first ones; a list, or an int64 tensor on the
                device, which the host does not read. None takes all. The first layer's call says it for all layers.
            layout: as in `gemmkit.attention`.

        Raises:
            ValueError: shapes do not fit; a sequence might get more tokens than its capacity, or there are too few pages; a
                layer appends twice, or another number of tokens than the first; a tensor requires a gradient.
            TypeError: another dtype.
        """
        rows = [self._rows(x, name, layout) for name, x in (("k", k), ("v", v))]
        tokens = rows[0].shape[1]
        if rows[1].shape[1] != tokens:
            raise ValueError(f"v has {rows[1].shape[1]} tokens and k has {tokens}; both must be equal")
        if not isinstance(layer, int) or not 0 <= layer < len(self.keys):
            raise ValueError(f"layer={layer!r}: the cache has {len(self.keys)} layers, from 0")
        if layer in self._behind:
            raise ValueError(f"layer {layer} has appended nothing in an earlier step, whose tokens it would have to have; "
                             "reset the cache")
        step = self._step
        if step is None or layer in step.done:
            if step is not None and layer != step.leader:
                raise ValueError(f"layer {layer} appends a second time before layer {step.leader}, which began the step")
            done = self._all if step is None else step.done
            step = self._begin(layer, tokens, counts)
            if len(done) < len(self._all):
                self._behind |= self._all - done
        elif tokens != step.tokens:
            raise ValueError(f"layer {layer} appends {tokens} tokens, and layer {step.leader} appended {step.tokens}; all "
                             "layers append as many")
        elif counts is not None and counts is not step.counts:
            raise ValueError(f"counts is given for layer {layer}; layer {step.leader}, which began the step, gives it for "
                             "all")
        step.done.add(layer)
        if tokens:
            with torch.no_grad():
                writes = [(held[layer][None].transpose(1, 2), 2, step.places, x.reshape(1, -1, *x.shape[2:]).transpose(1, 2))
                          for held, x in zip((self.keys, self.values), rows)]
                is_apart = step.counts is None         # what nobody counts goes to one row, all of it
                if not (is_apart and all(_are_rows(*write) for write in writes) and _are_written(*writes)):
                    for held, *write in writes:
                        held.index_copy_(*write)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int = 0, *, layout: str = "bhnd",
               mask: Any = CAUSAL, score: Any = None, scale: float | None = None) -> Any:
        """`append` k and v, and return the attention of q to all keys that the layer then has, of q's shape and layout. The
        last query is the last token; mask, score and scale are those of `gemmkit.attention`. What is refused appends
        nothing."""
        q = self._rows(q, "q", layout)
        check_rules(mask, score, scale)
        self.append(k, v, layer, layout=layout)
        found = attention(q, **self.arguments(layer), mask=mask, score=score, scale=scale)
        return found if layout == "bnhd" else found.transpose(1, 2)

    def arguments(self, layer: int = 0) -> dict[str, Any]:
        """The keywords of `gemmkit.attention` for what a layer has: k, v, key_lengths, pages and layout. q is (batch,
        queries, heads, head size)."""
        k, v = (x[layer, :-1].unflatten(0, (-1, self.page or self.capacity)) for x in (self.keys, self.values))
        found = dict(k=k, v=v, key_lengths=self.lengths, layout="bnhd")
        return found if self.table is None else {**found, "pages": self.table}

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens of each sequence, which a captured graph of your own will append: the host
        counts them now. Raises ValueError if they do not fit."""
        self._make_room(np.full(self.batch, tokens, np.int64))
        self._is_exact = False

    def reset(self, sequences: Sequence[int] | None = None) -> None:
        """Forget the tokens of some sequences, or of all; their pages are free again."""
        chosen = range(self.batch) if sequences is None else list(sequences)
        for b in chosen:
            if not 0 <= b < self.batch:
                raise ValueError(f"sequences names {b}; the cache has {self.batch} sequences, from 0")
        with torch.no_grad():
            for b in chosen:
                self.lengths[b].zero_()
                places = [(b * self.capacity, int(self.most[b]))] if self.page is None else [
                    (one * self.page, self.page) for one in self._owned[b]]
                for begin, count in places:            # whatever was there, attention multiplies it by 0
                    self.values[:, begin:begin + count].zero_()
                self.most[b] = 0
                if self.table is not None:
                    self.table[b].fill_(-1)
                    self._free += self._owned[b][::-1]
                    self._owned[b] = []
        self._is_exact = self._is_exact or not self.most.any()
        if not self.most.any():
            self._behind.clear()
        self._step = None

    def captured(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does what ``step`` does, by a CUDA graph from its third call on.

        ``step`` takes tensors, appends to this cache, and reads no tensor on the host. The first two calls run it as it is,
        and compile its kernels. Later ones copy their arguments into the graph's tensors, and return the graph's results,
        which the next call overwrites. Each call counts the tokens that it appends, and raises ValueError if these do not
        fit. Without a GPU every call runs it.
        """
        return _Captured(self, step)

    # -- places -------------------------------------------------------------------------------------------------------

    def _rows(self, x: torch.Tensor, name: str, layout: str) -> Any:
        """(batch, tokens, heads, head size)."""
        if layout not in ("bhnd", "bnhd"):
            raise ValueError(f'layout={layout!r}: "bhnd" or "bnhd" is needed')
        held, is_query = self.values if name == "v" else self.keys, name == "q"
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(getattr(x, 'shape', ()))}; a tensor of 4 axes is needed "
                             f"(layout={layout!r})")
        rows = x if layout == "bnhd" else x.transpose(1, 2)
        heads, size = held.shape[2:]
        if rows.shape[0] != self.batch or rows.shape[3] != size or (rows.shape[2] % heads if is_query else
                                                                    rows.shape[2] != heads):
            wanted = dict(b=self.batch, n="tokens", h=f"a multiple of {heads}" if is_query else heads, d=size)
            raise ValueError(f"{name} has shape {tuple(x.shape)}; ({', '.join(str(wanted[c]) for c in layout)}) is needed")
        if rows.device != self.device:
            raise ValueError(f"{name} is on {rows.device} and the cache is on {self.device}; both must be on one device")
        if rows.dtype != self.dtype:
            if not torch.is_autocast_enabled(rows.device.type):
                raise TypeError(f"{name} has dtype {rows.dtype} and the cache has {self.dtype}; both must be equal")
            rows = rows.to(self.dtype)
        if torch.is_grad_enabled() and x.requires_grad and (self.table is not None or not is_query):
            raise ValueError(f"{name} requires a gradient, and the cache has none; call under torch.no_grad(), or pass "
                             ".detach()")
        return rows

    def _begin(self, layer: int, tokens: int, counts: Any) -> _Step:
        """Begin a step: room for its tokens, their places, and the lengths with them."""
        added = np.full(self.batch, tokens, np.int64)
        if isinstance(counts, (list, tuple, np.ndarray)):
            added = np.asarray(counts)
            if added.shape != (self.batch,) or added.dtype.kind not in "iu" or added.min() < 0 or added.max() > tokens:
                raise ValueError(f"counts={counts!r}: {self.batch} whole numbers from 0 to {tokens} are needed")
        elif counts is not None and not (isinstance(counts, torch.Tensor) and counts.shape == (self.batch,)
                                         and counts.dtype == torch.int64 and counts.device == self.device):
            raise ValueError(f"counts is {counts!r}; a list of {self.batch} whole numbers is needed, or such an int64 "
                             "tensor on the cache's device")
        if _is_capturing(self.device):                 # they are counted when the graph runs
            self._in_graph += tokens
        else:
            self._make_room(added.astype(np.int64))
        self._is_exact = self._is_exact and not isinstance(counts, torch.Tensor)
        with torch.no_grad():
            have = None if counts is None else torch.as_tensor(counts, dtype=torch.int64, device=self.device)
            if have is not None:
                have = have.clamp(0, tokens)
            order = torch.arange(tokens, device=self.device)
            places = self._places(self.lengths[:, None] + order)
            if have is not None:
                places = torch.where(order < have[:, None], places, self.keys.shape[1] - 1)
            self.lengths += tokens if have is None else have
        self._step = _Step(layer, tokens, counts, places.flatten())
        return self._step

    def _places(self, tokens: torch.Tensor) -> Any:
        """The rows of tokens of these numbers, (batch, n). What is beyond the capacity, or in no page, is at no row: the
        device raises an assertion when it is written."""
        beyond = torch.iinfo(torch.int64).max
        if self.table is None:
            return torch.where(tokens < self.capacity, self._first + tokens, beyond)
        which = tokens // self.page
        page = self.table.gather(1, which.clamp_max(self.table.shape[1] - 1)).long()
        there = (page >= 0) & (which < self.table.shape[1]) & (tokens < self.capacity)
        return torch.where(there, page * self.page + tokens % self.page, beyond)

    def _count(self) -> int:
        """How many tokens each sequence has, where the host knows that they have as many; raises ValueError else."""
        least, most = int(self.most.min()), int(self.most.max())
        if least != most:
            raise ValueError(f"sequences have from {least} to {most} tokens; transformers' calls and reorder_cache need as "
                             "many of each: pad prompts on the left, or append and attend by calls of your own")
        self._check_exact()
        return most

    def _check_exact(self) -> None:
        if not self._is_exact:
            raise ValueError("the host does not know how many tokens there are, only that there are "
                             f"{self.most.max()} at most (reserve, or counts on the device); reset the cache first")

    def _make_room(self, tokens: np.ndarray) -> None:
        """Count so many more tokens of each sequence, and give them pages. Raises ValueError, and changes nothing, if these
        do not fit."""
        most = self.most + tokens
        if most.max() > self.capacity:
            b = int(most.argmax())
            raise ValueError(f"sequence {b} may have {self.most[b]} tokens; {tokens[b]} more do not fit into a capacity of "
                             f"{self.capacity}")
        if self.table is not None:
            wanted = [int(-(-n // self.page)) - len(owned) for n, owned in zip(most, self._owned)]
            if sum(x for x in wanted if x > 0) > len(self._free):
                raise ValueError(f"{sum(x for x in wanted if x > 0)} pages are needed and {len(self._free)} of "
                                 f"{self.keys.shape[1] // self.page} are free; reset sequences, or give pages=")
            with torch.no_grad():
                for b, count in enumerate(wanted):
                    for _ in range(count):
                        self.table[b, len(self._owned[b])].fill_(self._free[-1])
                        self._owned[b].append(self._free.pop())
        self.most = most

    # -- what transformers calls ----------------------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
               **keywords: Any) -> tuple[Any, Any]:
        """`append`, and return all keys and values of the layer, (batch, heads, tokens, head size). gemmkit's attention
        (`gemmkit.torch.accelerate`) recognises them, and reads them where they are. Those in pages, and those of a graph
        that is captured, nothing else can read: a function of PyTorch's that gets them raises TypeError."""
        self.append(key_states, value_states, layer_idx)
        of_layer = Stored(self, layer_idx, self._step)
        if self.table is not None or _is_capturing(self.device):
            return of_layer.unread(0), of_layer.unread(1)
        k, v = of_layer.plain()
        k._gemmkit_stored = v._gemmkit_stored = of_layer
        return k, v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens of each sequence. Raises ValueError where the host does not know it, and while a graph is captured."""
        if _is_capturing(self.device):
            raise ValueError("a graph is captured, in which the number of tokens would be a constant; pass the model "
                             "position_ids=cache.lengths[:, None] (before transformers 5 also "
                             "cache_position=cache.lengths[:1])")
        return self._count()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """`get_seq_length`, for masks. While a graph is captured, no mask is taken, and it is 0."""
        return 0 if _is_capturing(self.device) else self._count()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys a mask is for, and the first one's number. ``query_length``: the queries, or their places."""
        if _is_capturing(self.device):
            return self.capacity, 0
        return self._count() + (query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length), 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.capacity

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    @property
    def max_cache_len(self) -> int:
        return self.capacity

    @property
    def max_batch_size(self) -> int:
        return self.batch

    @property
    def batch_size(self) -> int:
        return self.batch

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    is_linear = is_dummy = is_sliding

    def __len__(self) -> int:
        return len(self.keys)

    def crop(self, tokens: int) -> None:
        """Forget the last ``-tokens`` tokens of each sequence, which has them. Raises ValueError for more than 0."""
        if tokens > 0:
            raise ValueError(f"crop({tokens}): the number of tokens to forget is needed, negated")
        self._check_exact()
        if self.most.min() < -tokens:
            raise ValueError(f"crop({tokens}): sequence {int(self.most.argmin())} has {self.most.min()} tokens at most")
        with torch.no_grad():
            places = self._places(self.lengths[:, None] + torch.arange(tokens, 0, device=self.device)).flatten()
            self.values.index_fill_(1, places, 0)
            self.lengths += tokens
        self.most = self.most + tokens
        self._step = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give each sequence the tokens of another one, as beam search does: what ``beam_idx`` names for it. All have as
        many."""
        if beam_idx.shape != (self.batch,):
            raise ValueError(f"beam_idx has shape {tuple(beam_idx.shape)}; ({self.batch},) is needed")
        order = torch.arange(self._count(), device=self.device).expand(self.batch, -1)
        with torch.no_grad():
            places, chosen = self._places(order), beam_idx.to(self.device)
            for held in (self.keys, self.values):
                held.index_copy_(1, places.flatten(), held.index_select(1, places[chosen].flatten()))
            self.lengths.copy_(self.lengths[chosen])

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError(f"the cache has {self.batch} sequences; make one for {repeats * self.batch}")

    def batch_select_indices(self, indices: Any) -> None:
        raise ValueError(f"the cache has {self.batch} sequences, which cannot change; call reset(sequences)")


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


class _Step:
    """The tokens that layers append one after the other: ``leader`` began, and ``done`` have appended them."""

    def __init__(self, leader: int, tokens: int, counts: Any, places: torch.Tensor):
        self.leader, self.tokens, self.counts, self.places = leader, tokens, counts, places
        self.done: set[int] = set()


# --------------------------------------------------------------------------------------------------
# What `KVCache.update` returns.

class Stored:
    """A layer of a cache during a step. Tensors that stand for it name it as ``_gemmkit_stored``."""

    def __init__(self, cache: KVCache, layer: int, step: _Step | None):
        self.cache, self.layer, self.step = cache, layer, step

    @property
    def is_current(self) -> bool:
        """Whether nothing has been appended since."""
        return self.cache._step is self.step

    def attention(self, q: torch.Tensor, is_causal: bool, scale: float | None) -> Any:
        """Attention of q (batch, queries, heads, head size) to all keys, by gemmkit."""
        return attention(q, **self.cache.arguments(self.layer), mask=CAUSAL if is_causal else None, scale=scale)

    def plain(self) -> tuple[Any, Any]:
        """Keys and values as tensors (batch, heads, tokens, head size): views; of pages copies."""
        cache = self.cache
        if _is_capturing(cache.device):
            raise TypeError("a captured graph reads a KVCache by gemmkit's attention alone, without a mask, a softcap or "
                            "dropout; give the model no attention_mask, or capture nothing")
        count = cache._count()
        if cache.table is None:
            of = cache.arguments(self.layer)
            return of["k"][:, :count].transpose(1, 2), of["v"][:, :count].transpose(1, 2)
        places = cache._places(torch.arange(count, device=cache.device).expand(cache.batch, -1))
        k, v = (x[self.layer][places].transpose(1, 2) for x in (cache.keys, cache.values))
        return k, v

    def unread(self, which: int) -> Any:
        """A tensor that only gemmkit's attention reads."""
        cache = self.cache
        held = (cache.keys, cache.values)[which]
        count = cache.capacity if _is_capturing(cache.device) else cache._count()
        shape = cache.batch, held.shape[2], count, held.shape[3]
        found = torch.Tensor._make_subclass(_Unread, held.new_empty(1).expand(shape))
        found._gemmkit_stored = self
        return found


class _Unread(torch.Tensor):
    """Keys or values that lie elsewhere: it has their shape, and no function takes it."""

    _gemmkit_stored: Stored

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" or func is torch.Tensor.dim or func is torch.Tensor.size:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise TypeError(f"{getattr(func, '__name__', func)} takes the keys of a KVCache that lie in pages, or that a "
                        "captured graph reads: only gemmkit's attention does; call gemmkit.torch.accelerate(model), and "
                        "give it no mask")


class _Captured:
    """`KVCache.captured`."""

    def __init__(self, cache: KVCache, step: Callable[..., Any]):
        self._cache, self._step, self._calls = cache, step, 0
        self._graph: Any = None
        self._given: tuple[torch.Tensor, ...] = ()
        self._found: Any = None
        self._tokens = 0

    def __call__(self, *args: torch.Tensor) -> Any:
        cache = self._cache
        if cache.device.type != "cuda":
            return self._step(*args)
        if self._graph is None:
            self._calls += 1
            if self._calls <= _WARM:
                return self._warm(args)
            self._capture(args)
        if len(args) != len(self._given) or any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(args, self._given)):
            raise ValueError(f"the step was captured with {[tuple(x.shape) for x in self._given]} and got "
                             f"{[tuple(x.shape) for x in args]}")
        cache._make_room(np.full(cache.batch, self._tokens, np.int64))
        for x, y in zip(args, self._given):
            y.copy_(x)
        self._graph.replay()
        return self._found

    def _warm(self, args: tuple[torch.Tensor, ...]) -> Any:
        """On another stream, as PyTorch wants it before a capture."""
        stream = torch.cuda.Stream(self._cache.device)
        stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(stream):
            found = self._step(*args)
        torch.cuda.current_stream(self._cache.device).wait_stream(stream)
        return found

    def _capture(self, args: tuple[torch.Tensor, ...]) -> None:
        self._given = tuple(x.clone() for x in args)
        self._cache._in_graph = 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._found = self._step(*self._given)
        self._graph, self._tokens = graph, self._cache._in_graph


# --------------------------------------------------------------------------------------------------
# Caches of others: their two writes of a step, of keys and of values, are one launch.
#
# A cache writes by ``index_copy_``, as transformers' static one does. The keys' write waits for the values'. Only views may
# be taken meanwhile: any other function of PyTorch's, and the end of the update, lets it go first.

@dataclass(frozen=True)
class Within(Component):
    """1 for a place that is one of ``count`` rows; for another the kernel traps, as PyTorch's ends by an assertion."""

    count: Scalar

    def __call__(self, place: int) -> Any:
        if place < 0 or place >= self.count:
            trap()
        return np.float32(1)


@program
def placed(k: Parameter, v: Parameter, at: Parameter, keys: Parameter, values: Parameter, within: Within) -> None:
    """Rows of k and v to the places ``at`` of keys and values."""
    for b, h, m in gp.parallel(*k.counts, k.rows):
        one = gp.call(within, at[m])                   # of the row: it is computed before a store leaves the row out
        keys[b, h, at[m]] = one * k[b, h, m]
        values[b, h, at[m]] = v[b, h, m]


class _Storing(TorchFunctionMode):
    """Two ``index_copy_`` of rows that follow each other are one launch of `placed`."""

    waits: tuple[Any, ...] | None = None

    def __torch_function__(self, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if function is torch.Tensor.index_copy_ and not kwargs and _are_rows(*args):
            first, self.waits = self.waits, None if self.waits else args
            if first is None:
                return args[0]
            if _are_written(first, args):
                return args[0]
            first[0].index_copy_(*first[1:])
        elif self.waits and not _is_view(function, args):
            self.release()
        return function(*args, **kwargs or {})

    def release(self) -> None:
        """Let a write go that waits."""
        waits, self.waits = self.waits, None
        if waits:
            waits[0].index_copy_(*waits[1:])

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.release()


def _are_rows(held: torch.Tensor, dim: object = None, *rest: torch.Tensor) -> bool:
    """Whether ``held.index_copy_(dim, at, x)`` puts rows (batch, heads, rows, head size) to places that lie apart."""
    if len(rest) != 2:
        return False
    at, x = rest
    given = held, at, x
    return (all(type(t) is torch.Tensor and t.device == held.device for t in given) and held.dim() == x.dim() == 4
            and dim in (2, -2) and x.dtype == held.dtype and x.dtype in NARROW and at.dtype == torch.int64 and at.dim() == 1
            and x.numel() > 0 and x.shape == (*held.shape[:2], len(at), held.shape[3]) and x.stride(3) == 1
            and is_here(x) and is_eager(given) and not records(held, x) and torch._debug_has_internal_overlap(held) == 0
            and held.untyped_storage().data_ptr() != x.untyped_storage().data_ptr())


def _are_written(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether two writes of rows to the same places of two arrays have been one launch."""
    (keys, _, at, k), (values, _, other, v) = first, second
    if at is not other or k.shape != v.shape or keys.shape != values.shape or k.device != v.device or len(
            {x.untyped_storage().data_ptr() for x in (keys, values, k, at)}) < 4:
        return False
    placed(k, v, at, keys, values, Within(np.int32(keys.shape[2])))
    for x in (keys, values):
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)
    return True


_SEEN = torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__


def _is_view(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function looks at a tensor, or takes a view of it, and reads nothing."""
    if function is not torch.Tensor.__getitem__:
        return function in _SEEN
    key = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(x is None or x is ... or type(x) in (int, slice) for x in key)


class Written:
    """A cache of keys and values whose ``update`` writes both by one launch, if it can be. All else is the cache's own."""

    def __init__(self, cache: object):
        self.__dict__["_cache"] = cache

    #: transformers asks of what class it is.
    __class__ = property(lambda self: type(self._cache))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_cache"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._cache, name, value)

    def __len__(self) -> int:
        return len(self._cache)

    def __bool__(self) -> bool:
        return bool(self._cache)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cache)

    def __getitem__(self, key: object) -> Any:
        return self._cache[key]

    def update(self, *args: object, **keywords: object) -> Any:
        with _Storing():
            return self._cache.update(*args, **keywords)


def storing(forward: Callable[..., Any], module: object, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What attention's ``forward`` returns, whose cache is `Written` meanwhile."""
    cache = keywords.get("past_key_values")
    if cache is None or isinstance(cache, KVCache) or not hasattr(cache, "update"):
        return forward(module, *args, **keywords)
    written = Written(cache)
    found = forward(module, *args, **{**keywords, "past_key_values": written})
    return tuple(cache if x is written else x for x in found) if type(found) is tuple else found
