"""One forward over rows: all layers in one compiled function that every thread of the team runs.

A layer is ten phases. In each, threads take the next piece of work from a shared counter (which thread takes a piece
never changes a result), then meet at a barrier. Nothing here touches Python, so the GIL is free for the whole step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...jit import njit
from .attention import CHUNK, SEGMENT, STATE, attend_chunk, attend_chunk_twice, clear_partial, combine
from .elementwise import append_cell, block_sums, embed, norm, rotate_queries
from .layout import FIELDS, ROWS, TILE
from .matmul import Input, Weights, put, put_added, put_gated, tile_outputs
from .simd import atomic_add, atomic_load, pointer, shifted, yield_thread

# A layer's matrices, in the order of their descriptors.
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_Q, _K, _V, _OUT, _GATE, _UP, _DOWN = range(len(MATRICES))

PHASES_A_LAYER = 10
PHASES_ELSEWHERE = 3
COUNTER_STRIDE = 8  # int64s between counters: a cache line
_SPINS = 2000  # barrier polls before a thread offers its processor


class Sizes(NamedTuple):
    """Plain numbers of the model and its buffers. `_ld`: floats from one row to the next, a multiple of 32."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int  # head_dim padded for the value cells
    rope_half: int  # rope dimensions / 2
    width: int
    rms_eps: np.float32
    q_scale: np.float32  # 1 / sqrt(head_dim)
    x_ld: int
    qkv_ld: int
    k_at: int  # where keys begin in a qkv row
    v_at: int
    att_ld: int
    ff_ld: int
    sums_ld: int
    vocab_ld: int
    chunks: int  # chunks of cells a slot
    segments: int  # partial results a (row, head)
    scratch_ld: int  # floats of scratch a thread


class Buffers(NamedTuple):
    """Flat arrays of a backend; inside the kernels the same fields are pointers."""

    u8: Any  # the arena of packed matrices under each type (matmul.Weights)
    i8: Any
    u16: Any
    i16: Any
    f32: Any
    matrices: Any  # int64 descriptors: 7 a layer, then embedding, then head
    norms: Any  # float32 [2 * layers + 1, x_ld]: attn and ffn norm of each layer, output norm
    cos: Any  # float32 [context, rope_half]
    sin: Any
    keys: Any  # float32 or uint16 [slots, chunks, layers, kv_heads, head_dim, 64]
    values: Any  # the same type [slots, chunks, layers, kv_heads, 64, value_dim]
    x: Any  # float32 [max_rows, x_ld]: the residual stream
    normed: Any  # float32 [max_rows, x_ld]
    qkv: Any  # float32 [max_rows, qkv_ld]
    att: Any  # float32 [max_rows, att_ld]
    hidden: Any  # float32 [max_rows, ff_ld]
    sums: Any  # float32 [max_rows, sums_ld]
    partial: Any  # float32 [max_rows, heads, segments, value_dim + 16]
    logits: Any  # float32 [max_rows, vocab_ld]
    scratch: Any  # float32 [threads, scratch_ld]: two tiles of outputs, or scores, or a column


class Step(NamedTuple):
    """Int32 arrays that describe one step; inside the kernels pointers and counts."""

    slot: Any
    position: Any
    token: Any
    wanted: Any
    spans: Any  # [.., 2]: first row and count of rows that follow one another in a slot, at most SPAN
    rows: Any
    wanted_count: Any
    span_count: Any


class Team(NamedTuple):
    """Who runs a kernel: this thread's number, how many threads there are, the shared counters."""

    thread: Any
    threads: Any
    counters: Any


@njit(nogil=True)
def _meet(team, phase):
    """Barrier behind `phase`; returns the next phase."""
    atomic_add(team.counters, 0, 1)
    spins = 0
    while atomic_load(team.counters, 0) < (phase + 1) * team.threads:
        spins += 1
        if spins > _SPINS:
            yield_thread()
    return phase + 1


@njit(nogil=True)
def _take(team, phase, count):
    """First of the next `count` pieces of work of a phase."""
    return atomic_add(team.counters, COUNTER_STRIDE * (phase + 1), count)


@njit(nogil=True)
def _matrix(buffers, layer, which):
    return shifted(buffers.matrices, (layer * len(MATRICES) + which) * FIELDS)


@njit(nogil=True)
def _tiles(matrix):
    return (matrix[ROWS] + TILE - 1) // TILE


@njit(nogil=True)
def _weights(buffers):
    return Weights(buffers.u8, buffers.i8, buffers.u16, buffers.i16, buffers.f32)


@njit(nogil=True)
def _embed_rows(team, phase, sizes, buffers, step, scratch):
    matrix = _matrix(buffers, sizes.layers, 0)
    row = _take(team, phase, 1)
    while row < step.rows:
        embed(_weights(buffers), matrix, step.token[row], buffers.x, row * sizes.x_ld, scratch)
        row = _take(team, phase, 1)
    return _meet(team, phase)


@njit(nogil=True)
def _norm_rows(team, phase, sizes, buffers, rows, which):
    """normed = norm of x by the weights of norm `which`, and its block sums."""
    row = _take(team, phase, 1)
    while row < rows:
        at = row * sizes.x_ld
        norm(
            buffers.x, at, buffers.norms, which * sizes.x_ld, buffers.normed, at, sizes.x_ld, sizes.width, sizes.rms_eps
        )  # fmt: skip
        block_sums(buffers.normed, at, sizes.x_ld, buffers.sums, row * sizes.sums_ld)
        row = _take(team, phase, 1)
    return _meet(team, phase)


@njit(nogil=True)
def _norm_wanted(team, phase, sizes, buffers, step):
    """normed = output norm of the wanted rows of x, packed together, and its block sums."""
    i = _take(team, phase, 1)
    while i < step.wanted_count:
        at = i * sizes.x_ld
        x_at = step.wanted[i] * sizes.x_ld
        norm(
            buffers.x, x_at, buffers.norms, 2 * sizes.layers * sizes.x_ld, buffers.normed, at,
            sizes.x_ld, sizes.width, sizes.rms_eps,
        )  # fmt: skip
        block_sums(buffers.normed, at, sizes.x_ld, buffers.sums, i * sizes.sums_ld)
        i = _take(team, phase, 1)
    return _meet(team, phase)


@njit(nogil=True)
def _project_qkv(team, phase, sizes, buffers, rows, layer, y):
    q, k, v = _matrix(buffers, layer, _Q), _matrix(buffers, layer, _K), _matrix(buffers, layer, _V)
    q_tiles, k_tiles = _tiles(q), _tiles(k)
    input = Input(buffers.normed, sizes.x_ld, buffers.sums, sizes.sums_ld)
    tile = _take(team, phase, 1)
    while tile < q_tiles + 2 * k_tiles:
        matrix, start, at = q, 0, 0
        if tile >= q_tiles + k_tiles:
            matrix, start, at = v, q_tiles + k_tiles, sizes.v_at
        elif tile >= q_tiles:
            matrix, start, at = k, q_tiles, sizes.k_at
        tile_outputs(_weights(buffers), matrix, tile - start, input, rows, y)
        put(y, rows, buffers.qkv, at + (tile - start) * TILE, sizes.qkv_ld)
        tile = _take(team, phase, 1)
    return _meet(team, phase)


@njit(nogil=True)
def _run(sizes, slot, position, layer, head):
    """Which run of 64 cells holds a position's key and value."""
    return ((slot * sizes.chunks + position // CHUNK) * sizes.layers + layer) * sizes.kv_heads + head


@njit(nogil=True)
def _partial(sizes, row, head, segment):
    """Where a partial result begins."""
    return ((row * sizes.heads + head) * sizes.segments + segment) * (sizes.value_dim + STATE)


@njit(nogil=True)
def _append_rows(team, phase, sizes, buffers, step, layer):
    """Rotate queries and keys; write keys and values to the cells."""
    row = _take(team, phase, 1)
    while row < step.rows:
        at, t = row * sizes.qkv_ld, step.position[row] * sizes.rope_half
        rotate_queries(
            buffers.qkv, at, sizes.heads, sizes.head_dim, buffers.cos, buffers.sin, t, sizes.rope_half, sizes.q_scale
        )
        for head in range(sizes.kv_heads):
            run = _run(sizes, step.slot[row], step.position[row], layer, head)
            append_cell(
                buffers.qkv, at + sizes.k_at + head * sizes.head_dim, at + sizes.v_at + head * sizes.head_dim,
                sizes.head_dim, sizes.value_dim, buffers.cos, buffers.sin, t, sizes.rope_half,
                buffers.keys, buffers.values, run, step.position[row] % CHUNK,
            )  # fmt: skip
        row = _take(team, phase, 1)
    return _meet(team, phase)


@njit(nogil=True)
def _attend_span(sizes, buffers, step, layer, first, count, head, segment, scores):
    """Partial results of one segment for `count` rows and the query heads of one kv head."""
    repeat, size = sizes.heads // sizes.kv_heads, sizes.value_dim + STATE
    end = first + count
    begin = segment * SEGMENT
    for h in range(head * repeat, (head + 1) * repeat):
        for row in range(first, end):
            clear_partial(buffers.partial, _partial(sizes, row, h, segment), sizes.value_dim)
    for start in range(begin, min(begin + SEGMENT, step.position[end - 1] + 1), CHUNK):
        cells = _run(sizes, step.slot[first], start, layer, head) * CHUNK
        k_at, v_at = cells * sizes.head_dim, cells * sizes.value_dim
        for h in range(head * repeat, (head + 1) * repeat):
            row = max(first, first + start - step.position[first])  # rows before it end before this chunk
            while row < end:
                valid = min(CHUNK, step.position[row] + 1 - start)
                q_at, p_at = row * sizes.qkv_ld + h * sizes.head_dim, _partial(sizes, row, h, segment)
                if valid == CHUNK and row + 1 < end:
                    attend_chunk_twice(
                        buffers.qkv, q_at, q_at + sizes.qkv_ld, buffers.keys, k_at, buffers.values, v_at,
                        sizes.head_dim, sizes.value_dim,
                        buffers.partial, p_at, p_at + sizes.heads * sizes.segments * size, scores,
                    )  # fmt: skip
                    row += 2
                else:
                    attend_chunk(
                        buffers.qkv, q_at, buffers.keys, k_at, buffers.values, v_at,
                        sizes.head_dim, sizes.value_dim, valid, buffers.partial, p_at, scores,
                    )  # fmt: skip
                    row += 1


@njit(nogil=True)
def _attend(team, phase, sizes, buffers, step, layer, scores):
    """Partial attention of every (span, kv head, segment)."""
    task = _take(team, phase, 1)
    base = 0
    for s in range(step.span_count):
        first, count = step.spans[2 * s], step.spans[2 * s + 1]
        segments = step.position[first + count - 1] // SEGMENT + 1
        while task < base + segments * sizes.kv_heads:
            head, segment = (task - base) // segments, (task - base) % segments
            _attend_span(sizes, buffers, step, layer, first, count, head, segment, scores)
            task = _take(team, phase, 1)
        base += segments * sizes.kv_heads
    return _meet(team, phase)


@njit(nogil=True)
def _combine_rows(team, phase, sizes, buffers, step):
    """att = combined partial results, and its block sums."""
    row = _take(team, phase, 1)
    while row < step.rows:
        at = row * sizes.att_ld
        segments = step.position[row] // SEGMENT + 1
        for h in range(sizes.heads):
            p_at, out_at = _partial(sizes, row, h, 0), at + h * sizes.head_dim
            combine(buffers.partial, p_at, segments, sizes.head_dim, sizes.value_dim, buffers.att, out_at)
        block_sums(buffers.att, at, sizes.att_ld, buffers.sums, row * sizes.sums_ld)
        row = _take(team, phase, 1)
    return _meet(team, phase)


@njit(nogil=True)
def _project_added(team, phase, sizes, buffers, rows, matrix, input, y):
    """x += matrix times the input."""
    tile = _take(team, phase, 1)
    while tile < _tiles(matrix):
        tile_outputs(_weights(buffers), matrix, tile, input, rows, y)
        put_added(y, rows, buffers.x, tile * TILE, sizes.x_ld)
        tile = _take(team, phase, 1)
    return _meet(team, phase)


@njit(nogil=True)
def _project_gated(team, phase, sizes, buffers, rows, layer, y, z):
    """hidden = silu(gate times normed) * (up times normed)."""
    gate, up = _matrix(buffers, layer, _GATE), _matrix(buffers, layer, _UP)
    input = Input(buffers.normed, sizes.x_ld, buffers.sums, sizes.sums_ld)
    tile = _take(team, phase, 1)
    while tile < _tiles(gate):
        tile_outputs(_weights(buffers), gate, tile, input, rows, y)
        tile_outputs(_weights(buffers), up, tile, input, rows, z)
        put_gated(y, z, rows, buffers.hidden, tile * TILE, sizes.ff_ld)
        tile = _take(team, phase, 1)
    return _meet(team, phase)


@njit(nogil=True)
def _sum_hidden(team, phase, sizes, buffers, rows):
    row = _take(team, phase, 1)
    while row < rows:
        block_sums(buffers.hidden, row * sizes.ff_ld, sizes.ff_ld, buffers.sums, row * sizes.sums_ld)
        row = _take(team, phase, 1)
    return _meet(team, phase)


@njit(nogil=True)
def _project_logits(team, phase, sizes, buffers, step, y):
    head = _matrix(buffers, sizes.layers, 1)
    input = Input(buffers.normed, sizes.x_ld, buffers.sums, sizes.sums_ld)
    batch = 4  # a tile alone is too small a piece for a long matrix
    tile = _take(team, phase, batch)
    while tile < _tiles(head):
        for t in range(tile, min(tile + batch, _tiles(head))):
            tile_outputs(_weights(buffers), head, t, input, step.wanted_count, y)
            put(y, step.wanted_count, buffers.logits, t * TILE, sizes.vocab_ld)
        tile = _take(team, phase, batch)
    return _meet(team, phase)


@njit(nogil=True)
def _layer(team, phase, sizes, buffers, step, layer, y, z):
    rows = step.rows
    phase = _norm_rows(team, phase, sizes, buffers, rows, 2 * layer)
    phase = _project_qkv(team, phase, sizes, buffers, rows, layer, y)
    phase = _append_rows(team, phase, sizes, buffers, step, layer)
    phase = _attend(team, phase, sizes, buffers, step, layer, y)
    phase = _combine_rows(team, phase, sizes, buffers, step)
    attended = Input(buffers.att, sizes.att_ld, buffers.sums, sizes.sums_ld)
    phase = _project_added(team, phase, sizes, buffers, rows, _matrix(buffers, layer, _OUT), attended, y)
    phase = _norm_rows(team, phase, sizes, buffers, rows, 2 * layer + 1)
    phase = _project_gated(team, phase, sizes, buffers, rows, layer, y, z)
    phase = _sum_hidden(team, phase, sizes, buffers, rows)
    gated = Input(buffers.hidden, sizes.ff_ld, buffers.sums, sizes.sums_ld)
    return _project_added(team, phase, sizes, buffers, rows, _matrix(buffers, layer, _DOWN), gated, y)


@njit(nogil=True)
def _pointers(b):
    return Buffers(
        pointer(b.u8), pointer(b.i8), pointer(b.u16), pointer(b.i16), pointer(b.f32), pointer(b.matrices),
        pointer(b.norms), pointer(b.cos), pointer(b.sin), pointer(b.keys), pointer(b.values), pointer(b.x),
        pointer(b.normed), pointer(b.qkv), pointer(b.att), pointer(b.hidden), pointer(b.sums), pointer(b.partial),
        pointer(b.logits), pointer(b.scratch),
    )  # fmt: skip


@njit(nogil=True, cache=True)
def run_step(thread, threads, counters, sizes, arrays, slot, position, token, wanted, spans):
    """One thread's share of a forward; all `threads` threads of the team must call it with the same arguments.

    counters  int64: the barrier, then one a phase, COUNTER_STRIDE apart; zeroed before the first thread enters. One
              thread may still be leaving the last barrier when another returns: steps take turns with two of these
    sizes     Sizes
    arrays    Buffers of arrays
    slot, position, token   int32 [n]
    wanted    int32 [m]: rows whose logits are left in arrays.logits[0:m]
    spans     int32 [s, 2]
    """
    buffers = _pointers(arrays)
    step = Step(
        pointer(slot), pointer(position), pointer(token), pointer(wanted), pointer(spans),
        len(slot), len(wanted), len(spans),
    )  # fmt: skip
    team = Team(thread, threads, pointer(counters))
    y = shifted(buffers.scratch, thread * sizes.scratch_ld)
    z = shifted(y, sizes.scratch_ld // 2)
    phase = _embed_rows(team, 0, sizes, buffers, step, y)
    for layer in range(sizes.layers):
        phase = _layer(team, phase, sizes, buffers, step, layer, y, z)
    if step.wanted_count > 0:
        phase = _norm_wanted(team, phase, sizes, buffers, step)
        _project_logits(team, phase, sizes, buffers, step, y)
