# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Tile building blocks of the generated CuTe kernels for Hopper: matrix products, softmax, stores, the queue of tiles, exact arithmetic.

Generated files import this module; nothing else in flexc does. What is decorated with `cute.jit` is inlined where it is called. An
accumulator fragment of a warpgroup's 64 x N tile holds, in register `4 * n + 2 * half + pair` of a thread, the element at

    row     16 * (warp of the warpgroup) + lane // 4 + 8 * half
    column  8 * n + 2 * (lane % 4) + pair

(the layout of WGMMA's D fragment, PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"). No postponed annotations here: the DSL
reads annotation objects.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
INF = float("inf")
GROUP_ROWS = 64  # rows of a warpgroup's product
GROUP_THREADS = 128
FIRST_TURN = 2  # named barriers from here on order the warpgroups; 0 is the block's own
FIRST_STORE = 8  # and from here on belong to one warpgroup each


# --- host side: products, layouts of shared memory, bulk copies -----------------------------------------------------------------------


def products(dtype, columns, head_dim_v):
    """A warpgroup's matrix products: scores = queries · keysᵀ from shared memory, and out += weights · values with weights in registers."""
    scores = hopper.make_trivial_tiled_mma(dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (GROUP_ROWS, columns))
    out = hopper.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (GROUP_ROWS, head_dim_v), warpgroup.OperandSource.RMEM
    )
    return scores, out


def layouts(dtype, groups, columns, stages, head_dim, head_dim_v):
    """Swizzled layouts in shared memory: queries and out one stage for each warpgroup, keys and values `stages` of them."""
    rows = GROUP_ROWS
    queries = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, columns, head_dim), dtype, groups)
    keys = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (rows, columns, head_dim), dtype, stages)
    values = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, (rows, head_dim_v, columns), dtype, stages)
    out = hopper.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (rows, head_dim_v), groups)
    return queries, keys, values, out


def tokens_first(x):
    """[batch, heads, tokens, dim] seen as (tokens, dim, heads, batch): a copy's box ends with its head, not in the next one."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0]))


def dims_first(x):
    """[batch, heads, tokens, dim] seen as (dim, tokens, heads, batch)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[3, 2, 1, 0]))


def stage_bytes(dtype, layout):
    """Bytes of one stage of a buffer."""
    return cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0)))


def bulk_load(x, layout, box, sharers=1):
    """Copies of one stage from global to shared memory; what lies outside the tensor arrives as 0. Of a stage that the blocks of a cluster
    share, each copies its part to all."""
    kind = cpasync.CopyBulkTensorTileG2SOp if sharers == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp
    return cpasync.make_tiled_tma_atom(kind(), x, cute.slice_(layout, (None, None, 0)), box, num_multicast=sharers)


def bulk_store(x, layout, box):
    """Copies of one stage from shared to global memory; what lies outside the tensor is not written."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), x, cute.slice_(layout, (None, None, 0)), box)


def choose(condition, x, y):
    """x where the condition holds, else y: both are computed, nothing branches. Both are numbers of the DSL, of one type."""
    if isinstance(condition, bool):
        return x if condition else y
    return type(x)(cutlass.select_(condition, x, y))


# --- device side: set-up --------------------------------------------------------------------------------------------------------------


def load_pipeline(barriers, stages, stage_bytes, consumer_warps, sharers=1):
    """Full and empty barriers of a ring of bulk copies: one warp fills, `consumer_warps` read, in each of `sharers` blocks of a cluster."""
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumer_warps * sharers),
        tx_count=stage_bytes,
        cta_layout_vmnk=cute.make_layout((1, sharers, 1, 1)),
        defer_sync=True,
    )


def queue_pipeline(barriers, consumer_warps, slots=2):
    """Barriers of the slots through which one warp tells the others which tile comes next."""
    return pipeline.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=slots,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumer_warps),
        defer_sync=True,
    )


def filling(stages):
    """Where the loading warp stands in a ring."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def reading(stages, first=0):
    """Where a reader stands in a ring, which begins at stage `first`."""
    return pipeline.PipelineState(stages, Int32(0), Int32(first), Int32(0))


def copy_pair(atom, shared, tiles, sharers=1, rank=0):
    """Both sides of a bulk copy: `shared` (rows, columns, stages) and `tiles` (rows, columns, blocks), or a block's part of them."""
    return cpasync.tma_partition(atom, rank, cute.make_layout(sharers), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))


def weights_fragment(scores, dtype):
    """Registers for the weights of a score fragment, labelled as the left operand of the second product: the same order, in pairs."""
    split = cute.logical_divide(scores.layout, ((None, None, 2), None, None))
    shape, stride = split.shape[0], split.stride[0]
    layout = cute.make_layout(
        ((shape[0], shape[1], shape[2][0]), split.shape[1], (shape[2][1], split.shape[2])),
        stride=((stride[0], stride[1], stride[2][0]), split.stride[1], (stride[2][1], split.stride[2])),
    )
    return cute.make_rmem_tensor(layout, dtype)


# --- device side: which tile, which blocks --------------------------------------------------------------------------------------------


@cute.jit
def place(tile, tiles, entries, section):
    """(row of blocks, entry of batch x heads) of a tile's number: heads in sections that share the L2 cache, rows outermost inside.

    A section that is smaller than the others comes first: at the end, the many short tiles of a whole section even out the work.
    """
    rest = entries % section
    later = tile - tiles * rest
    is_first = later < 0
    first = choose(is_first, Int32(0), rest + later // (tiles * section) * section)
    within = choose(is_first, tile, later % (tiles * section))
    size = choose(is_first, rest, section)
    return within // size, first + within % size


@cute.jit
def place_unevenly(tile, tiles, entries, section, kept: cutlass.Constexpr):
    """As `place`, but the last rows, which are the shortest tiles, come after all sections and even out the work at the end.

    They are at least `kept` tiles, or else a quarter of all.
    """
    late = cutlass.min(tiles // 4, (kept - 1) // entries + 1)
    first = (tiles - late) * entries
    row, entry = place(cutlass.min(tile, first - 1), tiles - late, entries, section)
    rest = tile - first
    is_late = rest >= 0
    return choose(is_late, tiles - late + rest // entries, row), choose(is_late, rest % entries, entry)


@cute.jit
def record_of(rows, batch, head, row):
    """A block map's row: first partial block and how many, first run of full blocks and how many. Batch and head may share one row."""
    entry = Int64(cutlass.min(batch, rows.shape[0] - 1)) * rows.shape[1] + cutlass.min(head, rows.shape[1] - 1)
    at = cute.make_tensor(rows.iterator + (entry * rows.shape[2] + row) * 4, cute.make_layout(4))
    return at[0], at[1], at[2], at[3]


@cute.jit
def fetch(counter, grid, total):
    """The next tile that nobody has begun; for a whole warp. Of `total` fetches in all the last one leaves the counter at 0 again."""
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(counter.iterator, Int32(1))
        if number == total - 1:
            counter[0] = Int32(0)
        number = number + grid
    return cute.arch.shuffle_sync(number, 0)


@cute.jit
def publish(queue, state, slots, values):
    """Hand the readers of the queue up to eight numbers; for a whole warp."""
    queue.producer_acquire(state)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(values)):
            slots[i, state.index] = values[i]
        queue.producer_commit(state)


@cute.jit
def receive(queue, state, slots, count: cutlass.Constexpr):
    """The first `count` of the numbers that the loading warp published, in every lane."""
    queue.consumer_wait(state)
    values = [slots[i, state.index] for i in range(count)]
    cute.arch.sync_warp()  # every lane has read before one says so
    if cute.arch.lane_idx() == 0:
        queue.consumer_release(state)
    return tuple([cute.arch.make_warp_uniform(value) for value in values])


# --- device side: products ------------------------------------------------------------------------------------------------------------


@cute.jit
def begin_scores(product, scores, queries, keys, group, stage):
    """Start scores = queries · keysᵀ; `warpgroup.wait_group` tells when it is done."""
    warpgroup.fence()
    atom = cute.make_mma_atom(product.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    for k in cutlass.range_constexpr(cute.size(queries, mode=[2])):
        cute.gemm(atom, scores, queries[None, None, k, group], keys[None, None, k, stage], scores)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def begin_out(product, out, weights, values, stage):
    """Start out += weights · values."""
    warpgroup.fence()
    atom = cute.make_mma_atom(product.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range_constexpr(cute.size(weights, mode=[2])):
        cute.gemm(atom, out, weights[None, None, k], values[None, None, k, stage], out)
    warpgroup.commit_group()


@cute.jit
def wait_turn(group):
    """Until the warpgroup before this one has started its products."""
    cute.arch.barrier(barrier_id=FIRST_TURN + group, number_of_threads=2 * GROUP_THREADS)


@cute.jit
def pass_turn(group, groups: cutlass.Constexpr):
    """It is the next warpgroup's turn to start products."""
    following = group + 1
    if const_expr(groups == 2):
        following = 1 - group
    else:
        following = choose(group == groups - 1, Int32(0), Int32(group + 1))
    cute.arch.barrier_arrive(barrier_id=FIRST_TURN + following, number_of_threads=2 * GROUP_THREADS)


# --- device side: which columns of a block a row may see ------------------------------------------------------------------------------


def columns_between(first, stop):
    """A bit for each of a thread's 32 columns of 128 (columns 8 * n and 8 * n + 1 from its first one on), set from `first` to `stop`."""
    start = _columns_below(first)
    count = cutlass.max(_columns_below(stop) - start, Int32(0))
    return cute.arch.inline_ptx("bmsk.clamp.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[start, count])


def _columns_below(limit):
    """How many of the thread's columns."""
    inside = cutlass.min(cutlass.max(limit, Int32(0)), Int32(128))
    return 2 * (inside >> 3) + cutlass.min(inside & 7, Int32(2))


@cute.jit
def keep_matching(words, word: cutlass.Constexpr, columns, rows):
    """Clear the bits of a word's columns whose value differs from that of the row; `columns`: of those four that the lane looks at.

    Of 128 columns these are 8 * (lane // 2) + lane % 2 + 2 * part, so that vote `part` is the word of the lanes with that rest by 4. Each
    round of votes is about the smallest value of the warp's rows that has not had its turn.
    """
    most = Int32(2**31 - 1)
    upper, lower = rows[0], rows[1]
    waits_upper, waits_lower = Boolean(True), Boolean(True)
    seen_upper, seen_lower = Int32(0), Int32(0)
    is_left = Boolean(True)
    while is_left:
        least = cutlass.min(choose(waits_upper, upper, most), choose(waits_lower, lower, most))
        value = cute.arch.warp_redux_sync(least, "min")
        seen = _own_vote([columns[4 * word + part] == value for part in range(4)])
        seen_upper = choose(upper == value, seen, seen_upper)
        seen_lower = choose(lower == value, seen, seen_lower)
        waits_upper = waits_upper & (upper != value)
        waits_lower = waits_lower & (lower != value)
        is_left = cute.arch.vote_any_sync(waits_upper | waits_lower)
    words[2 * word] = words[2 * word] & seen_upper
    words[2 * word + 1] = words[2 * word + 1] & seen_lower


@cute.jit
def keep_voted(words, word: cutlass.Constexpr, columns):
    """Clear the bits of a word's columns for which `columns` of the lane that looks at them is false; see `keep_matching`."""
    seen = _own_vote([columns[4 * word + part] != 0 for part in range(4)])
    words[2 * word] = words[2 * word] & seen
    words[2 * word + 1] = words[2 * word + 1] & seen


def _own_vote(conditions):
    """A bit of each lane: of the vote that is about this lane's columns."""
    votes = [cute.arch.vote_ballot_sync(condition) for condition in conditions]
    quad = cute.arch.lane_idx() % 4
    return choose(quad < 2, choose(quad == 0, votes[0], votes[1]), choose(quad == 2, votes[2], votes[3]))


@cute.jit
def hide_columns(scores, words):
    """Scores become -inf where the bit of their column is not set. In the order of the bits, so that ptxas tests seven at once (R2P)."""
    for half in cutlass.range_constexpr(2):
        for n in cutlass.range_constexpr(cute.size(scores) // 4):
            for pair in cutlass.range_constexpr(2):
                i = 4 * n + 2 * half + pair
                is_seen = (words[2 * (n // 16) + half] & _bit(2 * (n % 16) + pair)) != 0
                scores[i] = choose(is_seen, scores[i], Float32(-INF))


def _bit(number):
    """One bit of a word, by a constant number."""
    return Int32(1 << number if number < 31 else -(1 << 31))


@cute.jit
def read_diagonals(met, staged, first, slot):
    """The values of the diagonals that a thread's columns meet, from `first` - 8 on: its lower row meets eight columns later what the upper
    one does. So element `4 * n + 2 * half + pair` of a fragment is on diagonal `2 * (n + 1 - half) + pair` of these."""
    for n in cutlass.range_constexpr(cute.size(met) // 2):
        for pair in cutlass.range_constexpr(2):
            met[2 * n + pair] = staged[first + 8 * (n - 1) + pair, slot]


# --- device side: softmax -------------------------------------------------------------------------------------------------------------


@cute.jit
def exp2(x):
    """2^x by the special-function unit."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def exp2_polynomial(x):
    """2^x for |x| <= 125 by multiply-adds: relative error 7.5e-5, well below the rounding of weights to 16 bits. Of NaN the largest number,
    which is infinite in 16 bits: a row with NaN stays visible."""
    shifted = x + Float32(12582912.0)  # 1.5 * 2^23: the last bits become the nearest integer
    rest = x - (shifted - Float32(12582912.0))
    value = ((rest * Float32(0.05517166) + Float32(0.24261118)) * rest + Float32(0.69326099)) * rest + Float32(0.99992807)
    return (value.bitcast(Int32) + (shifted.bitcast(Int32) << 23)).bitcast(Float32)


@cute.jit
def row_maximum(scores, half: cutlass.Constexpr):
    """The largest of a thread's scores in one of its two rows, in four independent chains."""
    blocks = cute.size(scores) // 4
    best = [scores[2 * half], scores[2 * half + 1], scores[2 * half + 4], scores[2 * half + 5]]
    for n in cutlass.range_constexpr(2, blocks):
        for pair in cutlass.range_constexpr(2):
            chain = 2 * (n % 2) + pair
            best[chain] = cute.arch.fmax(best[chain], scores[4 * n + 2 * half + pair])
    return cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))


@cute.jit
def weigh(scores, half: cutlass.Constexpr, outer, shift, polynomial: cutlass.Constexpr):
    """scores = 2^(scores * outer - shift) in one row; returns their sum. `polynomial` of each eight avoid the special-function unit."""
    sums = [Float32(0.0)] * 4
    for n in cutlass.range_constexpr(cute.size(scores) // 4):
        for pair in cutlass.range_constexpr(2):
            i = 4 * n + 2 * half + pair
            exponent = scores[i] * outer - shift
            if const_expr((2 * n + pair) % 8 < polynomial):
                scores[i] = exp2_polynomial(exponent)
            else:
                scores[i] = exp2(exponent)
            chain = (2 * n + pair) % 4
            sums[chain] = sums[chain] + scores[i]
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@cute.jit
def softmax_step(scores, shifts, maximum, total, correction, outer, may_be_empty: cutlass.Constexpr, slack: cutlass.Constexpr):
    """Online softmax of one block, arXiv:1805.02867: scores become weights relative to the new maximum.

    Returns whether what was summed so far must shrink by `correction` in any row of the warp.

    Args:
        scores: in base 2 once multiplied by `outer`, which is positive.
        shifts: what is to be added to the scores of each of the two rows first, or None.
        maximum, total, correction: two values each, of the thread's two rows: the largest score so far (before `outer`), the thread's part
            of the sum of weights, and by what earlier weights shrink.
        may_be_empty: a row may have had no score but -inf so far; its weights are then 2^-inf, not 2^(-inf + inf).
        slack: a maximum is kept until scores outgrow it by more than that, in base 2: weights are then up to 2^slack.
    """
    grown = Boolean(slack == 0)
    for half in cutlass.range_constexpr(2):
        largest = row_maximum(scores, half)
        if const_expr(shifts is not None):
            largest = largest + shifts[half]
        largest = cute.arch.fmax(largest, maximum[half])
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=4)
        if const_expr(slack > 0):
            outgrows = (largest - maximum[half]) * outer > Float32(slack)  # not so of -inf and -inf
            largest = choose(outgrows, largest, maximum[half])
            grown = grown | outgrows
        safe = largest
        if const_expr(may_be_empty):
            safe = choose(largest == Float32(-INF), Float32(0.0), largest)
        correction[half] = exp2((maximum[half] - safe) * outer)
        if const_expr(slack > 0):
            correction[half] = choose(outgrows, correction[half], Float32(1.0))
        maximum[half] = largest
        if const_expr(shifts is not None):
            safe = safe - shifts[half]
        total[half] = total[half] * correction[half] + weigh(scores, half, outer, safe * outer, 0)
    return cute.arch.vote_any_sync(grown) if const_expr(slack > 0) else grown


@cute.jit
def weigh_before(total):
    """All weights before what has an effect and follows, such as the wait for a product.

    Otherwise ptxas moves most of their powers behind that wait. Sums of weights are not negative, so nobody sleeps.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.lt.f32 p, {$r0}, 0f00000000; @p nanosleep.u32 1; }", read_only_args=[Float32(total[0] + total[1])]
    )


@cute.jit
def bounded_softmax_step(scores, total, outer, shift: cutlass.Constexpr, polynomial: cutlass.Constexpr):
    """Softmax of one block whose scores are proved to lie near `shift`: no maximum is needed, and earlier weights never shrink."""
    for half in cutlass.range_constexpr(2):
        total[half] = total[half] + weigh(scores, half, outer, Float32(shift), polynomial)


@cute.jit
def pack(source, target):
    """Round to the 16-bit type of `target`, two neighbours an instruction."""
    for i in cutlass.range_constexpr(cute.size(source) // 2):
        pair = cute.make_tensor(source.iterator + 2 * i, 2).load()
        cute.make_tensor(target.iterator + 2 * i, 2).store(pair.to(target.element_type))


@cute.jit
def scale_rows(out, factors):
    """Both rows of a fragment times their factors."""
    for i in cutlass.range_constexpr(cute.size(out)):
        out[i] = out[i] * factors[(i // 2) % 2]


# --- device side: results -------------------------------------------------------------------------------------------------------------


@cute.jit
def finish_rows(total, maximum, outer, factors, lse):
    """The rows' factors 1 / sum and their lse as natural logarithms; 0 and -inf where a row had no key."""
    for half in cutlass.range_constexpr(2):
        whole = cute.arch.warp_reduction_sum(total[half], threads_in_group=4)
        is_empty = whole == Float32(0.0)
        factors[half] = choose(is_empty, Float32(0.0), cute.arch.rcp_approx(whole))
        value = (maximum[half] * outer + cute.math.log2(whole)) * Float32(LN2)
        lse[half] = choose(is_empty, Float32(-INF), value)


@cute.jit
def largest_scores(maximum, outer, largest):
    """The rows' largest scores in natural units."""
    for half in cutlass.range_constexpr(2):
        largest[half] = maximum[half] * outer * Float32(LN2)


@cute.jit
def store_rows(target, values, first, row, length):
    """Write the thread's two values, of a row each; one thread of the four that share a row does."""
    if cute.arch.lane_idx() % 4 == 0:
        for half in cutlass.range_constexpr(2):
            if row + 8 * half < length:
                cute.make_tensor(target.iterator + (first + row + 8 * half), 1)[0] = values[half]


@cute.jit
def stage_out(product, fragment, shared, thread, dtype: cutlass.Constexpr):
    """A warpgroup's output fragment, as 16-bit numbers, into its part of shared memory, where a bulk copy can read it."""
    rounded = cute.make_rmem_tensor(fragment.layout, dtype)
    pack(fragment, rounded)
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), product).get_slice(thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(shared))
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def group_barrier(group):
    """Waits for the four warps of a warpgroup."""
    cute.arch.barrier(barrier_id=FIRST_STORE + group, number_of_threads=GROUP_THREADS)


# --- device side: captured tensors ----------------------------------------------------------------------------------------------------


def element(tensor, offset, inside, dtype):
    """The element at a 64-bit offset as `dtype`, 0 where `inside` is false; nothing outside the tensor is read."""
    value = cute.make_tensor(tensor.iterator + choose(inside, offset, Int64(0)), cute.make_layout(1))[0]
    if dtype is Boolean:
        return (value != 0) & inside
    return choose(inside, value if value.dtype is dtype else value.to(dtype), dtype(0))


# --- arithmetic that the DSL lacks or rounds differently ------------------------------------------------------------------------------


def _instruction(text, x):
    return cute.arch.inline_ptx(text + " {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(x)])


def tanh_approx(x):
    """tanh by the special-function unit: relative error 2^-11."""
    return _instruction("tanh.approx.f32", x)


def reciprocal(x):
    """1 / x by the special-function unit, good to one unit in the last place."""
    return _instruction("rcp.approx.ftz.f32", x)


def round_even(x):
    """To the nearest integer, halves to the even one."""
    return _instruction("cvt.rni.f32.f32", x)


def truncate(x):
    """Towards zero."""
    return _instruction("cvt.rzi.f32.f32", x)


def floor(x):
    """The largest integer that is not above x."""
    return _instruction("cvt.rmi.f32.f32", x)


def ceil(x):
    """The least integer that is not below x."""
    return _instruction("cvt.rpi.f32.f32", x)


def minimum(x, y):
    """The smaller; NaN if either is."""
    return _of_two("min.NaN.f32", x, y)


def maximum(x, y):
    """The larger; NaN if either is."""
    return _of_two("max.NaN.f32", x, y)


def _of_two(text, x, y):
    return cute.arch.inline_ptx(text + " {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[Float32(x), Float32(y)])


def fused(x, y, z):
    """x * y + z, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[Float32(x), Float32(y), Float32(z)]
    )


def floor_quotient(x, y):
    """floor(x / y): the rounded quotient may be an integer that x / y does not reach, which the sign of the rest tells."""
    x, y = Float32(x), Float32(y)
    whole = floor(x / y)
    rest = fused(-whole, y, x)
    is_above = (rest != 0.0) & ((rest < 0.0) ^ (y < 0.0))
    return choose(is_above, whole - 1.0, whole)


def floor_rest(x, y):
    """x - floor(x / y) * y, of the sign of y."""
    x, y = Float32(x), Float32(y)
    rest = fused(-floor(x / y), y, x)
    is_off = (rest != 0.0) & ((rest < 0.0) ^ (y < 0.0))
    return choose(is_off, rest + y, rest)


def expm1(x):
    """e^x - 1 with all its digits near 0 (Kahan: the error of e^x cancels against that of its logarithm)."""
    x = Float32(x)
    power = cute.math.exp(x)
    less = power - 1.0
    value = less * (x / cute.math.log(power))
    value = choose(power == Float32(1.0), x, value)
    is_limit = (less == Float32(-1.0)) | (power == Float32(INF))
    return choose(is_limit, less, value)


def log1p(x):
    """log(1 + x) with all its digits near 0, in the same way."""
    x = Float32(x)
    more = x + 1.0
    value = cute.math.log(more) * (x / (more - 1.0))
    value = choose(more == Float32(1.0), x, value)
    return choose(more == Float32(INF), more, value)


def power(x, y):
    """x to the power of y; of a negative x only to whole y."""
    return Float32(x) ** Float32(y)


def absolute(x):
    """The magnitude, of the same type."""
    return abs(x)


def bound(x):
    """An integer as an Int32 that no difference with a position overflows: beyond 2^30 every position compares alike."""
    wide = Int64(x)
    wide = choose(wide > Int64(2**30), Int64(2**30), wide)
    return choose(wide < Int64(-(2**30)), Int64(-(2**30)), wide).to(Int32)
