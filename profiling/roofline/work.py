"""What one rank moves, computes, launches and exchanges in the stages of a round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from profiling.roofline.hardware import REACH, Gpu, Reach
from profiling.roofline.models import Attention, FeedForward, Model

ROWS = 8
"""Verify rows, and rows of the MTP advance, a request."""
LAUNCHES = {"attention": 8, "delta": 8, "mlp": 4, "experts": 12}
ASSUMPTIONS = (
    "Launches a layer: attention 8 (norm, qkv, q/k norm + RoPE, store, attention, combine, gate, out), delta net 8 "
    "(norm, two projections, convolution, gates, recurrence, gated norm, out), MLP 4 (norm, up, activation, down), "
    "experts 12 (norm, router, top-k, two for sorting, up, activation, down, sum, three for the shared expert).",
    "Tensor parallel: projections, experts (each cut by width), v heads and the head cut evenly; kv heads at least one "
    "a rank; norms, router, MTP's and the drafter's input projection and the fusion matrix whole on each rank; one "
    "all-reduce after each mixer, each feed-forward and each embedding look-up.",
    "Experts read by n tokens: experts * (1 - (1 - active / experts) ** n) a layer, routing uniform and independent. "
    "Real routing is skewed and rows of a request agree, so fewer are read.",
    "Delta net state in float32: read once, written once a verify row (a rejected row's state must not stay).",
    "KV caches, activations and, unless fp8 is asked for, weights in bf16; the head stays bf16. Activations between "
    "kernels are not counted.",
    "Engine route, launches counted in the source of SGLang 0.5.23: T1 4 and an all-gather of [B, V] logits for the "
    "head, 10 and an all-reduce of the block's embeddings for the fusion; drafter's head 7 and 2 small all-gathers; "
    "page table and block 12 (for DFlash with the embeddings' all-reduce; before the drafter's graph, so in `commit`); "
    "a store a layer in the commit. The target's tokens: head, all-gather of logits, argmax.",
    "Ops route (this library), a whole embedding table on each rank: T1 and block 4 launches and one MAX over 16 bytes "
    "a request, drafter's head 3 and one MAX, page table 1, commit 1; both heads read int8 rows (three int8 products a "
    "weight). The rest is the engine's.",
)


@dataclass(frozen=True)
class Part:
    """Work of one rank that runs before or after its neighbours, never beside them.

    `reduces` are the bytes of each all-reduce, `gathers` those that a rank receives in each other collective;
    `eight_bit`: the flops run at the fp8 (and int8) rate.
    """

    nbytes: float = 0
    flops: float = 0
    launches: float = 0
    reduces: tuple[float, ...] = ()
    gathers: tuple[float, ...] = ()
    eight_bit: bool = False

    def times(self, count: int) -> Part:
        """The part `count` times."""
        return replace(
            self,
            nbytes=self.nbytes * count,
            flops=self.flops * count,
            launches=self.launches * count,
            reduces=self.reduces * count,
            gathers=self.gathers * count,
        )

    def seconds(self, gpu: Gpu, reach: Reach = REACH) -> float:
        """`max(bytes / bandwidth, flops / rate)`, launches and collectives."""
        rate = (gpu.fp8 if self.eight_bit else gpu.bf16) * reach.flops
        exchanged = sum(reach.reduce_latency + b / reach.reduce_rate for b in self.reduces)
        exchanged += sum(reach.nccl_latency + b / (gpu.link * reach.link) for b in self.gathers)
        return max(self.nbytes / (gpu.bandwidth * reach.bandwidth), self.flops / rate) + (
            self.launches * reach.launch + exchanged
        )


@dataclass(frozen=True)
class Setting:
    """One round: `batch` requests of `context` tokens over `tp` ranks.

    `method`: `dflash` ([A, MASK x7]), `single_anchor` ([T1, MASK x6]) or `dmtp` ([A, T1, MASK x6]); `route`: `engine`
    or `ops`; `weight_bytes`: 2, or 1 for fp8 weights; `exchange` False leaves every collective out.
    """

    model: Model
    batch: int
    tp: int = 1
    context: int = 1024
    method: str = "dmtp"
    route: str = "engine"
    weight_bytes: int = 2
    exchange: bool = True

    @property
    def slots(self) -> int:
        return 7 if self.method == "single_anchor" else 8

    @property
    def drafted(self) -> int:
        """Rows of the drafter that the head decides, a request."""
        return 7 if self.method == "dflash" else 6

    def reduces(self, rows: int, width: int | None = None) -> tuple[float, ...]:
        """One all-reduce of `[rows, width]` in bf16 (default width: the hidden size)."""
        return (2.0 * rows * (width or self.model.hidden),) if self.tp > 1 and self.exchange else ()

    def gathers(self, *received: float) -> tuple[float, ...]:
        """Other collectives, by what all ranks together send."""
        return tuple(b * (self.tp - 1) / self.tp for b in received) if self.tp > 1 and self.exchange else ()


def linear(
    s: Setting, rows: int, weights: float, *, whole: bool = False, launches: float = 0, reduces: tuple[float, ...] = ()
) -> Part:
    """A product of `rows` rows with `weights` elements, cut over the ranks unless `whole`."""
    mine = weights if whole else weights / s.tp
    return Part(mine * s.weight_bytes, 2 * rows * mine, launches, reduces, eight_bit=s.weight_bytes == 1)


def attention(s: Setting, shape: Attention, rows: int, context: int) -> list[Part]:
    """One attention layer over `rows` rows a request, each of which sees `context` rows besides."""
    n, hidden = s.batch * rows, s.model.hidden
    q, kv = shape.q_heads * shape.dim, shape.kv_heads * shape.dim
    weights = hidden * (q * (3 if shape.gated else 2) + 2 * kv)
    kept = max(1.0, shape.kv_heads / s.tp) * shape.dim
    seen = context + rows
    scores = Part(nbytes=s.batch * seen * kept * 4, flops=4 * n * seen * q / s.tp)
    return [linear(s, n, weights, launches=LAUNCHES["attention"], reduces=s.reduces(n)), scores]


def delta(s: Setting) -> list[Part]:
    """One gated delta net layer of the target."""
    shape, n = s.model.delta, s.batch * ROWS
    qk, v = shape.qk_heads * shape.dim, shape.v_heads * shape.dim
    weights = s.model.hidden * (2 * qk + 3 * v + 2 * shape.v_heads)
    state = s.batch * shape.v_heads * shape.dim**2 / s.tp
    recurrence = Part(nbytes=state * 4 * (1 + ROWS), flops=state * ROWS * 6)
    return [linear(s, n, weights, launches=LAUNCHES["delta"], reduces=s.reduces(n)), recurrence]


def distinct_experts(shape: FeedForward, tokens: int) -> float:
    """Expected experts that `tokens` tokens read, routing uniform and independent."""
    return shape.experts * (1 - (1 - shape.active / shape.experts) ** tokens)


def feed_forward(s: Setting, shape: FeedForward, rows: int) -> list[Part]:
    """The feed-forward of one layer over `rows` rows a request."""
    n, hidden = s.batch * rows, s.model.hidden
    if not shape.experts:
        return [linear(s, n, 3 * hidden * shape.width, launches=LAUNCHES["mlp"], reduces=s.reduces(n))]
    one = 3 * hidden * shape.width / s.tp
    routed = Part(
        nbytes=distinct_experts(shape, n) * one * s.weight_bytes,
        flops=2 * n * shape.active * one,
        launches=LAUNCHES["experts"],
        reduces=s.reduces(n),
        eight_bit=s.weight_bytes == 1,
    )
    return [routed, linear(s, n, hidden * shape.experts, whole=True), linear(s, n, 3 * hidden * shape.shared)]


def head(s: Setting, rows: int, *, launches: float, gathers: tuple[float, ...], int8: bool = False) -> Part:
    """The vocabulary head over `rows` rows: bf16, or the int8 screen with its scale and bound a row."""
    mine = s.model.vocab * s.model.hidden / s.tp
    if int8:
        stream = mine + 8 * s.model.vocab / s.tp
        return Part(stream, 6 * rows * mine, launches, gathers=gathers, eight_bit=True)
    return Part(2 * mine, 2 * rows * mine, launches, gathers=gathers)


def verify(s: Setting) -> list[Part]:
    """The target over 8 rows a request, its tokens and the accepted prefix."""
    model, n = s.model, s.batch * ROWS
    layers = [p.times(model.delta_layers) for p in delta(s)]
    layers += [p.times(model.attention_layers) for p in attention(s, model.attention, ROWS, s.context)]
    depth = model.delta_layers + model.attention_layers
    layers += [p.times(depth) for p in feed_forward(s, model.feed_forward, ROWS)]
    tokens = head(s, n, launches=2, gathers=s.gathers(2.0 * n * model.vocab))
    return [Part(launches=1, reduces=s.reduces(n)), *layers, tokens, Part(launches=3)]


def draft(s: Setting) -> list[Part]:
    """The drafter over its slots, and the head over those it predicts."""
    model, rows = s.model, s.batch * s.drafted
    layer = attention(s, model.drafter_attention, s.slots, min(s.context, model.window))
    layer += feed_forward(s, model.drafter_feed_forward, s.slots)
    if s.route == "ops":
        tokens = head(s, rows, int8=True, launches=3, gathers=s.gathers(s.tp * 16.0 * rows))
    else:
        tokens = head(s, rows, launches=7, gathers=s.gathers(*(s.tp * 8.0 * rows,) * 2))
    return [*(p.times(model.drafter_layers) for p in layer), tokens]


def t1(s: Setting) -> list[Part]:
    """T1's selection, embedding and fusion."""
    fusion = linear(s, s.batch, 2 * s.model.hidden**2, whole=True)
    if s.route == "ops":
        return [head(s, s.batch, int8=True, launches=4, gathers=s.gathers(s.tp * 16.0 * s.batch)), fusion]
    logits = s.gathers(2.0 * s.batch * s.model.vocab)
    return [
        head(s, s.batch, launches=4, gathers=logits),
        replace(fusion, launches=10, reduces=s.reduces(s.batch * s.slots)),
    ]


def mtp(s: Setting) -> list[Part]:
    """The MTP module over 8 rows a request: embedding, two norms, input projection, one layer."""
    n = s.batch * ROWS
    prolog = linear(s, n, 2 * s.model.hidden**2, whole=True, launches=7, reduces=s.reduces(n))
    layer = attention(s, s.model.attention, ROWS, s.context) + feed_forward(s, s.model.feed_forward, ROWS)
    return [prolog, *layer, Part(launches=1)]


def commit(s: Setting) -> list[Part]:
    """The drafter's context rows of what was verified, all stores, the next round's page table and block."""
    model, n = s.model, s.batch * ROWS
    kv = model.drafter_attention.kv_heads * model.drafter_attention.dim
    context = linear(s, n, model.drafter_features * model.hidden**2, whole=True, launches=2)
    rows = linear(s, n, 2 * kv * model.hidden * model.drafter_layers, launches=2)
    stores = model.drafter_layers + (0 if s.method == "dflash" else 1)
    if s.route == "ops":
        return [context, rows, Part(launches=2)]
    block = s.reduces(s.batch * s.slots) if s.method == "dflash" else ()
    return [context, rows, Part(launches=stores + 12, reduces=block)]


def stages(s: Setting) -> dict[str, list[Part]]:
    """The work of one round by stage; a method without MTP has no `mtp` and no `t1`."""
    added = {} if s.method == "dflash" else {"t1": t1(s), "mtp": mtp(s)}
    return {**added, "draft": draft(s), "verify": verify(s), "commit": commit(s)}


def milliseconds(parts: Iterable[Part], gpu: Gpu, reach: Reach = REACH) -> float:
    """Predicted time of parts that run one after the other."""
    return 1e3 * sum(p.seconds(gpu, reach) for p in parts)
