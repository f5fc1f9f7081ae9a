# mypy: ignore-errors
"""Chooses the token of each row of logits: one program a row, which reads nothing on the host.

The rules are those of `decoding/truncation.py`: shares are whole numbers, whose sums are exact in any
order, and every float is computed by operations that round alike everywhere. So the choice is that of
the torch reference, bit for bit. The least rank that is kept is found by bisection over the ordered
bits of the logits' gaps, without a sort.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Of 2 to the power of [-1/2, 1/2]: Cephes, exp2f.
C1 = tl.constexpr(6.931472028550421e-1)
C2 = tl.constexpr(2.402264791363012e-1)
C3 = tl.constexpr(5.550332471162809e-2)
C4 = tl.constexpr(9.618437357674640e-3)
C5 = tl.constexpr(1.339887440266574e-3)
C6 = tl.constexpr(1.535336188319500e-4)
UNIT_BITS = tl.constexpr(34)  # of the unit in `truncation.py`
PARAMETERS = tl.constexpr(6)  # float64 numbers of a row: see `launch.py`
LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def _share(gaps):
    """Of each gap, in units of 2^-34: int64."""
    power = tl.maximum(gaps, -40.0) * LOG2E  # below it, shares are 0
    whole = tl.floor(power + 0.5)
    x = power - whole
    value = x * C6 + C5
    value = value * x + C4
    value = value * x + C3
    value = value * x + C2
    value = value * x + C1
    value = value * x + 1.0
    scale = ((whole.to(tl.int32) + (127 + UNIT_BITS)) << 23).to(tl.float32, bitcast=True)
    return (value * scale).to(tl.int64)


@triton.jit
def _key(gaps):
    """Whole numbers in the order of the gaps, from 0 down; both zeros have the same."""
    bits = tl.where(gaps == 0.0, 0.0, gaps).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _gaps(logits, ids, vocab, best, temperature, floor):
    """Of ids that are not in the vocabulary, or below the floor of min-p: minus infinity."""
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    gaps = tl.div_rn(x - best, tl.zeros_like(x) + temperature)
    return tl.where(gaps < floor, float("-inf"), gaps)


@triton.jit
def _greatest(logits, vocab, BLOCK: tl.constexpr):
    """The greatest logit and its first id. A logit that is not a number counts as infinite."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)
        first = tl.where(x > best, ids, first)
        best = tl.maximum(best, x)
    peak = tl.max(best, 0)
    return peak, tl.min(tl.where(best == peak, first, vocab), 0)


@triton.jit
def _weight(gaps, by_count):
    return tl.where(by_count, 1, _share(gaps))


@triton.jit
def _sum_from(kept, count, cutoff, by_count, BLOCK: tl.constexpr):
    """The weight of the kept gaps whose key is at least the cutoff."""
    total = tl.zeros([], tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        gaps = tl.load(kept + at, mask=at < count, other=float("-inf"))
        taken = (at < count) & (_key(gaps).to(tl.int64) >= cutoff)
        total += tl.sum(tl.where(taken, _weight(gaps, by_count), 0), 0)
    return total


@triton.jit
def _cutoff(kept, count, least, needed, by_count, BLOCK: tl.constexpr):
    """The greatest key from which on the kept gaps weigh what is needed, or `least`."""
    low = least
    high = tl.zeros([], tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        if _sum_from(kept, count, middle, by_count, BLOCK) >= needed:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _of_mass(top_p, total):
    """How much mass top-p keeps of the total."""
    needed = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(needed, 1), total)


@triton.jit
def _share_of_key(key):
    """The share that every gap of this key has."""
    bits = key.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    gap = bits.to(tl.float32, bitcast=True)
    return tl.where(gap == gap, _share(gap), 0)


@triton.jit
def _keep_candidates(
    kept, logits, vocab, best, temperature, floor, top_p, top_k, BLOCK: tl.constexpr
):
    """Copies the gaps among which the last kept rank is to `kept`. Returns their number."""
    by_count = top_k > 0
    total = tl.zeros([], tl.int64)
    near = tl.zeros([], tl.int64)
    middle = tl.zeros([], tl.int64)
    far = tl.zeros([], tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        gaps = _gaps(logits, ids, vocab, best, temperature, floor)
        weight = tl.where(ids < vocab, _weight(gaps, by_count), 0)
        total += tl.sum(weight, 0)
        near += tl.sum(tl.where(gaps >= -2.0, weight, 0), 0)
        middle += tl.sum(tl.where(gaps >= -5.0, weight, 0), 0)
        far += tl.sum(tl.where(gaps >= -10.0, weight, 0), 0)
    needed = tl.minimum(top_k.to(tl.int64), total)
    if not by_count:
        needed = _of_mass(top_p, total)
    bound = tl.where(far >= needed, -10.0, float("-inf"))
    bound = tl.where(middle >= needed, -5.0, bound)
    bound = tl.where(near >= needed, -2.0, bound)
    count = tl.zeros([], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        gaps = _gaps(logits, ids, vocab, best, temperature, floor)
        taken = ((gaps >= bound) & (ids < vocab)).to(tl.int32)
        places = count + tl.cumsum(taken, 0) - taken
        tl.store(kept + places, gaps, mask=taken > 0)
        count += tl.sum(taken, 0)
    tl.debug_barrier()  # other threads of the program read what was stored
    return count, needed


@triton.jit
def _ranked(kept, logits, vocab, best, temperature, floor, top_p, top_k, BLOCK: tl.constexpr):
    """The key of the last kept rank, how many ids that have it are kept, and the mass of all kept."""
    count, needed = _keep_candidates(
        kept, logits, vocab, best, temperature, floor, top_p, top_k, BLOCK
    )
    by_count = top_k > 0
    cutoff = tl.full([], LOWEST, tl.int64)
    limit = vocab.to(tl.int64)
    if by_count:
        cutoff = _cutoff(kept, count, cutoff, needed, by_count, BLOCK)
        limit = needed - _sum_from(kept, count, cutoff + 1, by_count, BLOCK)
        above = _sum_from(kept, count, cutoff + 1, False, BLOCK)
        needed = _of_mass(top_p, above + limit * _share_of_key(cutoff))
    least = cutoff
    cutoff = _cutoff(kept, count, least, needed, False, BLOCK)
    above = _sum_from(kept, count, cutoff + 1, False, BLOCK)
    share = _share_of_key(cutoff)
    ties = (needed - above + share - 1) // tl.maximum(share, 1)
    if cutoff == least:
        ties = tl.minimum(ties, limit)
    return cutoff, ties, above + ties * share


@triton.jit
def _all(logits, vocab, best, temperature, floor, BLOCK: tl.constexpr):
    total = tl.zeros([], tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        total += tl.sum(_share(_gaps(logits, ids, vocab, best, temperature, floor)), 0)
    return total


@triton.jit
def _at(logits, vocab, best, temperature, floor, cutoff, ties, target, BLOCK: tl.constexpr):
    """The first id at which the sum of the kept shares exceeds the target."""
    token = vocab - 1
    start = tl.zeros([], tl.int32)
    while start < vocab:
        ids = start + tl.arange(0, BLOCK)
        gaps = _gaps(logits, ids, vocab, best, temperature, floor)
        key = _key(gaps).to(tl.int64)
        tied = ((key == cutoff) & (ids < vocab)).to(tl.int64)
        share = tl.where(key > cutoff, _share(gaps), 0)
        share = tl.where((tied > 0) & (tl.cumsum(tied, 0) <= ties), _share(gaps), share)
        total = tl.sum(share, 0)
        if total > target:
            before = tl.cumsum(share, 0) <= target
            token = start + tl.sum(before.to(tl.int32), 0)
            start = vocab
        else:
            target -= total
            ties -= tl.sum(tied, 0)
            start += BLOCK
    return token


@triton.jit
def sample_kernel(
    tokens, last, sequences, logits, parameters, kept, vocab, stride,
    GREEDY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tokens: int64 [rows], -1 for a row whose logits are not finite. last: int64, by sequence row, the
    same but 0. kept: float32 [rows, vocab], memory for candidates."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    best, token = _greatest(logits, vocab, BLOCK)
    finite = (best > float("-inf")) & (best < float("inf"))
    if not GREEDY:
        parameters += row * PARAMETERS
        temperature = tl.load(parameters).to(tl.float32)
        if finite & (temperature > 0):
            uniform = tl.load(parameters + 1)
            floor = tl.load(parameters + 2).to(tl.float32)
            top_p = tl.load(parameters + 3)
            top_k = tl.load(parameters + 4).to(tl.int32)
            if (top_k > 0) | (top_p < 1.0):
                cutoff, ties, total = _ranked(
                    kept + row * vocab, logits, vocab, best, temperature, floor, top_p, top_k, BLOCK
                )
            else:
                cutoff = tl.full([], LOWEST, tl.int64)
                ties = tl.zeros([], tl.int64)
                total = _all(logits, vocab, best, temperature, floor, BLOCK)
            target = (uniform * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            token = _at(logits, vocab, best, temperature, floor, cutoff, ties, target, BLOCK)
    tl.store(tokens + row, tl.where(finite, token, -1).to(tl.int64))
    tl.store(last + tl.load(sequences + row), tl.where(finite, token, 0).to(tl.int64))
