"""Heads as tiles: what the kernels of attention do with the channels of some points, on the chip.

A program has the channels of a head as two tiles, the first and the second of each pair that is turned together, so
that nothing moves between threads. Tiles have powers of two for sides. Where a kernel multiplies, it takes the 48 pairs
of a head of 96 channels in two pieces, of 32 and 16: in one of 64, a quarter of all work would be wasted. All that is
said of pieces goes through a tuple of tiles, one for each.
"""

import math

import torch
import triton
import triton.language as tl


def edges_of(pairs: int) -> tuple[int, ...]:
    """Where pieces of the pairs of a head begin, and where the last one ends, which may be beyond the last pair.

    The sizes are powers of two, as large as fit, but none is below 16, the least that tensor cores take.
    """
    edges = [0]
    while edges[-1] < pairs:
        edges.append(edges[-1] + max(2 ** int(math.log2(pairs - edges[-1])), 16))
    return tuple(edges)


def step_of(width: int) -> int:
    """How many channels of x are multiplied at a time: a power of two that wastes little, as above."""
    return max(math.gcd(width, 64), 16)


def product_precision() -> str:
    """Of products of float32 numbers."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@triton.constexpr_function  # a plain difference is no shape in Triton 3.5
def size_of(edges, piece):
    """How much lies between an edge and the next."""
    return edges[piece + 1] - edges[piece]


@triton.jit
def place_of(batch, points, ROWS: tl.constexpr):
    """Sample and points of a program; samples come first, so that programs side by side share their tables."""
    program = tl.program_id(0)
    row = program // batch * ROWS + tl.arange(0, ROWS)
    return (program % batch).to(tl.int64), row.to(tl.int64), row < points


@triton.jit
def _channels(BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Where the first channel of each pair of a piece lies, and which exist; the second lies PAIRS further."""
    pair = BEGIN + tl.arange(0, END - BEGIN)
    return pair // PAIRS * (2 * PAIRS) + pair % PAIRS, pair < WIDTH // 2


@triton.jit
def angle_tiles(here, exists, WIDTH: tl.constexpr, EDGES: tl.constexpr):
    """Cosines or sines of the points, one tile for each piece."""
    tiles = ()
    for piece in tl.static_range(len(EDGES) - 1):
        angle = EDGES[piece] + tl.arange(0, size_of(EDGES, piece))
        there = exists[:, None] & (angle < WIDTH // 2)[None, :]
        tiles += (tl.load(here[:, None] + angle[None, :], mask=there, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def factor_tiles(here, exists, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """The channels of the points before the projection, STEP at a time."""
    tiles = ()
    for step in tl.static_range((WIDTH + STEP - 1) // STEP):
        channel = step * STEP + tl.arange(0, STEP)
        there = exists[:, None] & (channel < WIDTH)[None, :]
        tiles += (tl.load(here[:, None] + channel[None, :], mask=there, other=0.0),)
    return tiles


@triton.jit
def both_channels(BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Where all channels of a piece lie, and which exist: the first of each pair, and then the second."""
    SIZE: tl.constexpr = END - BEGIN
    column = tl.arange(0, 2 * SIZE)
    pair = BEGIN + column % SIZE
    return pair // PAIRS * (2 * PAIRS) + pair % PAIRS + column // SIZE * PAIRS, pair < WIDTH // 2


@triton.jit
def apart(x):
    """First and second channels of a piece; what belongs together lies in one thread."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def matrix_tiles(
    matrix, BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr
):
    """What makes a piece in the matrix of a head, STEP channels of what it takes at a time."""
    to, real = both_channels(BEGIN, END, WIDTH, PAIRS)
    tiles = ()
    for step in tl.static_range((WIDTH + STEP - 1) // STEP):
        channel = step * STEP + tl.arange(0, STEP)
        there = (channel < WIDTH)[:, None] & real[None, :]
        tiles += (tl.load(matrix + to[None, :] * WIDTH + channel[:, None], mask=there, other=0.0),)
    return tiles


@triton.jit
def pair_product(factors, tiles, PRECISION: tl.constexpr):
    """First and second channels of a piece, from one product."""
    total = tl.zeros((factors[0].shape[0], tiles[0].shape[1]), tl.float32)
    for step in tl.static_range(len(factors)):
        total = tl.dot(factors[step], tiles[step], total, input_precision=PRECISION)
    return apart(total)


@triton.jit
def head_tiles(
    factors, matrix, here, exists, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The projected channels of a head, multiplied or read: the first and the second of each pair, tiles by piece."""
    a, b = (), ()
    for piece in tl.static_range(len(EDGES) - 1):
        if STEP:
            tiles = matrix_tiles(matrix, EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS, STEP)
            first, second = pair_product(factors, tiles, PRECISION)
        else:
            channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
            at, there = here[:, None] + channel[None, :], exists[:, None] & real[None, :]
            first = tl.load(at, mask=there, other=0.0).to(tl.float32)
            second = tl.load(at + PAIRS, mask=there, other=0.0).to(tl.float32)
        a += (first,)
        b += (second,)
    return a, b


@triton.jit
def _mean(a, b, WIDTH: tl.constexpr):
    """Over the channels of a head."""
    total = tl.sum(a[0] + b[0], 1)
    for piece in tl.static_range(1, len(a)):
        total += tl.sum(a[piece] + b[piece], 1)
    return (total / WIDTH)[:, None]


@triton.jit
def centered(a, b, WIDTH: tl.constexpr, EDGES: tl.constexpr, EPSILON: tl.constexpr):
    """A head less its mean, and one over its spread."""
    mean = _mean(a, b, WIDTH)
    p, q, squares_p, squares_q = (), (), (), ()
    for piece in tl.static_range(len(a)):
        first, second = a[piece] - mean, b[piece] - mean
        if EDGES[piece + 1] > WIDTH // 2:  # what lies beyond the last pair stays zero
            real = EDGES[piece] + tl.arange(0, size_of(EDGES, piece)) < WIDTH // 2
            first, second = tl.where(real[None, :], first, 0.0), tl.where(real[None, :], second, 0.0)
        p += (first,)
        q += (second,)
        squares_p += (first * first,)
        squares_q += (second * second,)
    return p, q, tl.rsqrt(_mean(squares_p, squares_q, WIDTH) + EPSILON)


@triton.jit
def made_head(
    a, b, inverse, gains, c, s, w, TURNED: tl.constexpr, AFFINE: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """A head of a part as the product takes it, from centered channels; factors in a row are multiplied first."""
    p, q = (), ()
    for piece in tl.static_range(len(a)):
        if AFFINE:
            channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
            gain = gains + channel
            first = a[piece] * inverse * tl.load(gain, mask=real, other=0.0).to(tl.float32)[None, :]
            second = b[piece] * inverse * tl.load(gain + PAIRS, mask=real, other=0.0).to(tl.float32)[None, :]
            first += tl.load(gain + WIDTH, mask=real, other=0.0).to(tl.float32)[None, :]
            second += tl.load(gain + WIDTH + PAIRS, mask=real, other=0.0).to(tl.float32)[None, :]
            first, second = first * w, second * w
        else:
            first, second = a[piece] * (inverse * w), b[piece] * (inverse * w)
        if TURNED:
            first, second = first * c[piece] - second * s[piece], second * c[piece] + first * s[piece]
        p += (first,)
        q += (second,)
    return p, q


@triton.jit
def made_head_back(
    g, h, a, b, inverse, of_gains, gains, c, s, w, NORMALIZED: tl.constexpr, TURNED: tl.constexpr,
    AFFINE: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """From the gradient of a part to that of its projection, with the sums for the gradients of factors and shifts."""
    if TURNED:
        p, q = (), ()
        for piece in tl.static_range(len(g)):
            p += (g[piece] * c[piece] + h[piece] * s[piece],)
            q += (h[piece] * c[piece] - g[piece] * s[piece],)
        g, h = p, q
    if AFFINE:
        of_gains = _added(of_gains, g, h, a, b, w, w * inverse)
        g, h = _scaled(g, gains, WIDTH, PAIRS, EDGES), _scaled(h, gains + PAIRS, WIDTH, PAIRS, EDGES)
    if NORMALIZED:
        g, h = _straight(g, h, a, b, inverse, w, WIDTH)
    else:
        g, h = _times(g, w), _times(h, w)
    return g, h, of_gains


@triton.jit
def _times(g, factor):
    """Times the factors of the points."""
    tiles = ()
    for piece in tl.static_range(len(g)):
        tiles += (g[piece] * factor,)
    return tiles


@triton.jit
def store_head(to, p, q, exists, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr):
    """All tiles of a head."""
    for piece in tl.static_range(len(p)):
        channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
        at, there = to[:, None] + channel[None, :], exists[:, None] & real[None, :]
        tl.store(at, p[piece].to(to.dtype.element_ty), mask=there)
        tl.store(at + PAIRS, q[piece].to(to.dtype.element_ty), mask=there)


@triton.jit
def no_tiles(ROWS: tl.constexpr, EDGES: tl.constexpr):
    """Zeros for some rows, tile by tile: for half of the channels of a head, or for all columns of a result."""
    tiles = ()
    for piece in tl.static_range(len(EDGES) - 1):
        tiles += (tl.zeros((ROWS, size_of(EDGES, piece)), tl.float32),)
    return tiles


@triton.jit
def store_gains(sums, of_gains, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr):
    """The sums of one part, for factors and then for shifts."""
    for piece in tl.static_range(len(EDGES) - 1):
        channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
        gain_a, gain_b, shift_a, shift_b = of_gains[piece]
        tl.store(sums + channel, gain_a, mask=real)
        tl.store(sums + channel + PAIRS, gain_b, mask=real)
        tl.store(sums + channel + WIDTH, shift_a, mask=real)
        tl.store(sums + channel + WIDTH + PAIRS, shift_b, mask=real)


@triton.jit
def _straight(g, h, a, b, inverse, w, WIDTH: tl.constexpr):
    """Back through a norm: a gradient without what would move or stretch together all channels of a head, a and b.

    The two sums are taken as one: so the gradient is dealt out to the threads as the product is, and not twice.
    """
    total = tl.sum(tl.join(g[0] + h[0], g[0] * a[0] + h[0] * b[0]), 1)
    for piece in tl.static_range(1, len(g)):
        total += tl.sum(tl.join(g[piece] + h[piece], g[piece] * a[piece] + h[piece] * b[piece]), 1)
    mean, along = tl.split(total / WIDTH)
    scale = w * inverse
    mean, along = mean[:, None] * scale, along[:, None] * (scale * inverse * inverse)
    p, q = (), ()
    for piece in tl.static_range(len(g)):
        p += (g[piece] * scale - mean - a[piece] * along,)
        q += (h[piece] * scale - mean - b[piece] * along,)
    return p, q


@triton.jit
def _scaled(g, gains, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr):
    """Times the factors of an affine norm."""
    tiles = ()
    for piece in tl.static_range(len(g)):
        channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
        tiles += (g[piece] * tl.load(gains + channel, mask=real, other=0.0).to(tl.float32)[None, :],)
    return tiles


@triton.jit
def no_sums(EDGES: tl.constexpr):
    """Zeros for `_added` to begin with."""
    sums = ()
    for piece in tl.static_range(len(EDGES) - 1):
        zero = tl.zeros((size_of(EDGES, piece),), tl.float32)
        sums += ((zero, zero, zero, zero),)
    return sums


@triton.jit
def _added(sums, g, h, a, b, of_shift, of_gain):
    """Sums over points for the gradients of factors and shifts, by piece, with those of one more head.

    The gradient g, h and the centered channels a, b lack the factors of the points that come last.
    """
    found = ()
    for piece in tl.static_range(len(g)):
        gain_a, gain_b, shift_a, shift_b = sums[piece]
        p, q = g[piece], h[piece]
        gain_a, gain_b = gain_a + tl.sum(p * a[piece] * of_gain, 0), gain_b + tl.sum(q * b[piece] * of_gain, 0)
        shift_a, shift_b = shift_a + tl.sum(p * of_shift, 0), shift_b + tl.sum(q * of_shift, 0)
        found += ((gain_a, gain_b, shift_a, shift_b),)
    return found
