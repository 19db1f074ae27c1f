# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Building blocks of the generated CuTe backward kernels for Hopper, beside those of `cute_tiles`.

Scores are held transposed: rows of a fragment are keys, columns are queries. The tiles of all products belong to both computing
warpgroups together; each has its half of the rows or of the columns. No postponed annotations here: the DSL reads annotation objects.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from flexc.runtime.cute_tiles import choose, fetch, record_of

GROUPS = 2
GROUP_THREADS = 128
ALL = 1  # named barriers: both computing warpgroups;
FULL, EMPTY = 2, 10  # the buffer of a warpgroup's part of the queries' gradient, with the warp that adds it up: from here on one each
WARP_TOO = GROUP_THREADS + 32


# --- host side: products, layouts of shared memory --------------------------------------------------------------------------------------


def products(dtype, by_keys, rows, head_dim, head_dim_v):
    """The matrix products of a step: transposed scores, and the gradients of values, keys and queries.

    By keys each warpgroup has 64 rows of the first three, whose left operands after the first stay in registers; otherwise it has half of
    the columns, and left operands lie in shared memory. Of the queries' gradient it has 64 rows if there are 128, half of the columns if
    there are 64; of any other number of queries the gradient is transposed, [dims, queries], and a warpgroup has 64 of the first 128
    dimensions; see `rest_product`.
    """
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    atoms = (GROUPS, 1, 1) if by_keys else (1, GROUPS, 1)
    share = 1 if by_keys else GROUPS
    source = warpgroup.OperandSource.RMEM if by_keys else warpgroup.OperandSource.SMEM

    def product(left, right, atoms, width, source=warpgroup.OperandSource.SMEM):
        return hopper.make_trivial_tiled_mma(dtype, dtype, left, right, Float32, atoms, (64, width), source)

    scores = product(k_major, k_major, atoms, rows // share)
    dv = product(k_major, mn_major, atoms, head_dim_v // share, source)
    dk = product(k_major, mn_major, atoms, head_dim // share, source)
    high = rows // 64
    if rows % 64:
        dq = product(mn_major, k_major, (GROUPS, 1, 1), rows)
    else:
        dq = product(mn_major, mn_major, (high, GROUPS // high, 1), head_dim * high // GROUPS)
    return scores, dv, dk, dq


def rest_product(dtype, rows):
    """The last 64 of 192 dimensions of a transposed gradient of queries, [dims, queries]: a warpgroup has half of the queries."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    source = warpgroup.OperandSource.SMEM
    return hopper.make_trivial_tiled_mma(dtype, dtype, mn_major, k_major, Float32, (1, GROUPS, 1), (64, rows // GROUPS), source)


def layouts(dtype, by_keys, by_parts, rows, columns, stages, head_dim, head_dim_v):
    """Swizzled layouts in shared memory: q, dout, k, v, scores; and dk, dv, dq before a bulk copy stores them.

    Scores are [keys, queries], and [queries, keys] where the queries are not whole rows of the swizzle.
    Gradients of keys and values are a warpgroup's by parts, and both's otherwise. Products also read the others flipped, a share of the
    columns for each warpgroup; no share ends inside a row of the swizzle.
    """
    share = 1 if by_keys else GROUPS
    dq_share = 64 if rows % 64 else head_dim * (rows // 64) // GROUPS
    own_rows, own = (64, share) if by_parts else (columns, 1)
    return (
        _rows_in_shared(dtype, rows, head_dim, stages, head_dim // share),
        _rows_in_shared(dtype, rows, head_dim_v, stages, head_dim_v // share),
        _rows_in_shared(dtype, columns, head_dim, 1, dq_share),
        _rows_in_shared(dtype, columns, head_dim_v, 1, head_dim_v),
        _rows_in_shared(dtype, rows, columns, 2, columns) if rows % 64 else _rows_in_shared(dtype, columns, rows, 2, rows),
        _rows_in_shared(dtype, own_rows, head_dim // own, 1, head_dim // share),
        _rows_in_shared(dtype, own_rows, head_dim_v // own, 1, head_dim_v // share),
        _rows_in_shared(dtype, rows, head_dim, 1, dq_share),
    )


def _rows_in_shared(dtype, rows, width, stages, share):
    """Rows of `width` 16-bit numbers in the widest swizzle, of 64 or 32 numbers, whose rows a warpgroup's share is made of."""
    assert share % 32 == 0, "a share that ends inside a row of the swizzle"
    kind = warpgroup.SmemLayoutAtomKind.K_SW64 if share % 64 else warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, width, stages), order=(0, 1, 2))


def rows_product(dtype, width):
    """A warpgroup's product of 64 rows: how its gradients of keys and values lie in registers."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    return hopper.make_trivial_tiled_mma(dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (64, width))


def dims_of(x, first, count):
    """`count` dimensions from `first` on, both whole 64s, of one stage of rows in shared memory in the widest swizzle."""
    tokens = cute.size(x, mode=[0])
    layout = _rows_in_shared(x.element_type, tokens, count, 1, 64).outer
    return cute.make_tensor(x.iterator + first * tokens, cute.select(layout, mode=list(range(cute.rank(x)))))


def flipped(x):
    """Shared memory (rows, columns, stages) seen as (columns, rows, stages)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0, 2]))


# --- device side: products --------------------------------------------------------------------------------------------------------------


@cute.jit
def begin(product, out, left, left_stage, right, right_stage, is_first: cutlass.Constexpr):
    """Start out = left · right, or += unless it is the first, with both operands in shared memory."""
    warpgroup.fence()
    atom = cute.make_mma_atom(product.op)
    atom.set(warpgroup.Field.ACCUMULATE, not is_first)
    for k in cutlass.range_constexpr(cute.size(left, mode=[2])):
        cute.gemm(atom, out, left[None, None, k, left_stage], right[None, None, k, right_stage], out)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def begin_from_registers(product, out, left, right, right_stage):
    """Start out += left · right with the left operand in registers."""
    warpgroup.fence()
    atom = cute.make_mma_atom(product.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range_constexpr(cute.size(left, mode=[2])):
        cute.gemm(atom, out, left[None, None, k], right[None, None, k, right_stage], out)
    warpgroup.commit_group()


def same_registers(fragment, shape):
    """Another fragment of as many registers, in the same ones: ptxas would keep both, and spill."""
    return cute.make_tensor(fragment.iterator, cute.make_rmem_tensor(shape, Float32).layout)


@cute.jit
def all_barrier():
    """Waits for both computing warpgroups."""
    cute.arch.barrier(barrier_id=ALL, number_of_threads=GROUPS * GROUP_THREADS)


# --- device side: weights and gradients of scores ---------------------------------------------------------------------------------------


@cute.jit
def pair_of(sums, quad, n, which: cutlass.Constexpr, stage):
    """lse in base 2 (0) or delta (1) of two neighbouring queries."""
    both = sums[None, quad, n, which, stage].load()
    return both[0], both[1]


@cute.jit
def block_of(numbers, stage):
    """Which block of queries a stage holds: the same for all threads."""
    return cute.arch.make_warp_uniform(numbers[stage].to(Int32))


@cute.jit
def pack_four(values, target, n: cutlass.Constexpr):
    """Round four values, the two rows' neighbours, to a fragment's registers 4 n and following."""
    for half in cutlass.range_constexpr(2):
        pair = cute.make_tensor(values.iterator + 2 * half, 2).load()
        cute.make_tensor(target.iterator + (4 * n + 2 * half), 2).store(pair.to(target.element_type))


@cute.jit
def score_gradients(weights, gradients, packed, sums, quad, group_blocks, stage):
    """weights * (gradients - delta), rounded to `packed`.

    Args:
        weights: of each element, times the derivative of its score.
        gradients: products of values and the output's gradients.
        group_blocks: blocks of eight queries before the warpgroup's own.
    """
    for n in cutlass.range_constexpr(cute.size(weights) // 4):
        delta = pair_of(sums, quad, n + group_blocks, 1, stage)
        for half in cutlass.range_constexpr(2):
            i = 4 * n + 2 * half
            gradients[i] = weights[i] * (gradients[i] - delta[0])
            gradients[i + 1] = weights[i + 1] * (gradients[i + 1] - delta[1])
            pair = cute.make_tensor(gradients.iterator + i, 2).load()
            cute.make_tensor(packed.iterator + i, 2).store(pair.to(packed.element_type))


@cute.jit
def rounded_weight(weights, i: cutlass.Constexpr):
    """A weight as the values' gradient is made from it."""
    return cute.make_tensor(weights.iterator + i, 1).load()[0].to(Float32)


@cute.jit
def add_number(target, offset, value, is_on):
    """Adds a number to an element of a float32 tensor in global memory, where `is_on`."""
    if is_on:
        cute.arch.atomic_add(target.iterator + offset, value, sem="relaxed", scope="gpu")


@cute.jit
def is_seen(words, n: cutlass.Constexpr, half: cutlass.Constexpr, pair: cutlass.Constexpr):
    """Whether the bit of a column is set, see `cute_tiles.columns_between`."""
    number = 2 * (n % 16) + pair
    bit = Int32(1 << number if number < 31 else -(1 << 31))
    return (words[2 * (n // 16) + half] & bit) != 0


@cute.jit
def store_scores(product, packed, fragment, shared, stage, thread, is_flipped: cutlass.Constexpr = False):
    """A packed fragment of transposed scores into a stage of shared memory; `fragment` has the layout of its registers.

    Where `is_flipped`, the memory has rows of queries, and `shared` is that seen `flipped`.
    """
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(is_flipped, 4), packed.element_type)
    copy = cute.make_tiled_copy_C(atom, product).get_slice(thread)
    target = copy.partition_D(shared[None, None, stage])
    cute.copy(copy, copy.retile(cute.make_tensor(packed.iterator, fragment.layout)), target)


@cute.jit
def publish_shared():
    """What this thread wrote to shared memory is there for products and bulk copies that start after a barrier."""
    cute.arch.fence_proxy("async.shared", space="cta")


# --- device side: bulk copies of numbers in a row ---------------------------------------------------------------------------------------


@cute.jit
def clear_floats(target, count: cutlass.Constexpr, thread):
    """Sets `count` float32 numbers in global memory to 0, 16 bytes at a time; for 128 threads."""
    four = cute.make_rmem_tensor(4, Float32)
    four.fill(0.0)
    for i in cutlass.range_constexpr(count // (4 * GROUP_THREADS)):
        at = cute.assume(4 * (thread + GROUP_THREADS * i), divby=4)
        cute.autovec_copy(four, cute.make_tensor(target + at, cute.make_layout(4)))


@cute.jit
def load_sums(source, target, count: cutlass.Constexpr, barrier):
    """`count` float32 numbers from global to shared memory; a whole warp calls, one thread copies."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[target.toint(), source.toint(), Int32(4 * count), barrier.toint()],
        )


@cute.jit
def add_floats(source, target, count: cutlass.Constexpr):
    """Add `count` float32 numbers in shared memory to those in global memory; returns when shared memory has been read."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.toint(), source.toint(), Int32(4 * count)],
        )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()


@cute.jit
def wait_for_turn(turns, block, part, rank):
    """Until `rank` blocks of keys have added their part to a block of queries."""
    place = turns.iterator + (Int64(block) * GROUPS + part)
    done = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
    while done != rank:
        done = cute.arch.load(place, Int32, sem="acquire", scope="gpu")


@cute.jit
def end_turn(turns, block, part):
    """What this warp has added to a block of queries is there; the next one's turn."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.atomic_add(turns.iterator + (Int64(block) * GROUPS + part), Int32(1), sem="release", scope="gpu")
    cute.arch.sync_warp()


@cute.jit
def take_first_tile(counter, fetches, place):
    """The first tile of a block of threads, from the counter, into shared memory; for one warp. `fetches`: see `cute_tiles.fetch`."""
    number = fetch(counter, 0, fetches)
    with cute.arch.elect_one():
        cute.make_tensor(place, cute.make_layout(1))[0] = number


@cute.jit
def first_tile(place):
    """What `take_first_tile` found, after a barrier: the same for all threads."""
    return cute.arch.make_warp_uniform(cute.make_tensor(place, cute.make_layout(1))[0])


@cute.jit
def visits(rows, partial_blocks, full_runs, batch, head, row, block):
    """1 if a row of a block map visits this block, else 0; blocks may differ between lanes."""
    partial, partial_count, full, full_count = record_of(rows, batch, head, row)
    found = Int32(0)
    for i in cutlass.range(partial_count, unroll=4):
        found = choose(partial_blocks[partial + i] == block, Int32(1), found)
    for i in cutlass.range(full_count, unroll=1):
        found = choose((full_runs[full + i, 0] <= block) & (block < full_runs[full + i, 1]), Int32(1), found)
    return found


@cute.jit
def sums_before(first, count, step, is_on):
    """Replaces `count` integers in global memory, `step` apart, by the sum of those before each, where `is_on`; each lane has its own.

    Several are read at once, because each takes its way to the L2 cache and back.
    """
    total = Int32(0)
    some = cute.make_rmem_tensor(16, Int32)
    for at in cutlass.range(0, count, 16, unroll=1):
        for i in cutlass.range_constexpr(16):
            some[i] = cute.make_tensor(first + Int64(cutlass.min(at + i, count - 1)) * step, 1)[0]
        for i in cutlass.range_constexpr(16):
            if is_on & (at + i < count):
                cute.make_tensor(first + Int64(at + i) * step, 1)[0] = total
            total = total + some[i]


@cute.jit
def rank_of(ranks, batch, head, position, block):
    """How many blocks of keys add to a block of queries before the one whose tile is at this position. Batch and head may share it."""
    entry = Int64(cutlass.min(batch, ranks.shape[0] - 1)) * ranks.shape[1] + cutlass.min(head, ranks.shape[1] - 1)
    at = (entry * ranks.shape[2] + position) * ranks.shape[3] + block
    return cute.make_tensor(ranks.iterator + at, 1)[0]


@cute.jit
def blocks_behind(partial_blocks, first, count, full_runs, run, run_count):
    """How many of a row's partial blocks, which are in order, lie behind its last full one; all of them where none is full."""
    early, end = Int32(0), Int32(0)
    if run_count > 0:
        end = Int32(count)
    while early < end:
        middle = (early + end) // 2
        is_early = partial_blocks[first + middle] < full_runs[run + run_count - 1, 1]
        early, end = choose(is_early, middle + 1, early), choose(is_early, end, middle)
    return count - early


def numbers_before(fragments, i):
    """A thread's registers in the fragments before this one."""
    return sum(cute.size(fragment) for fragment in fragments[:i])


@cute.jit
def fill_part(buffer, part, group, size: cutlass.Constexpr, thread):
    """A warpgroup's fragments, one after the other, into its part of the buffer once that is empty.

    A thread's registers in fours, those of 128 threads in a row.
    """
    cute.arch.barrier(barrier_id=EMPTY + group, number_of_threads=WARP_TOO)
    for i in cutlass.range_constexpr(len(part)):
        fours = cute.size(part[i]) // 4
        first = group * size + (thread % GROUP_THREADS) * 4 + GROUP_THREADS * numbers_before(part, i)
        target = cute.make_tensor(buffer.iterator + first, cute.make_layout((4, fours), stride=(1, 512)))
        cute.autovec_copy(cute.make_tensor(part[i].iterator, cute.make_layout((4, fours))), target)
    publish_shared()
    cute.arch.barrier_arrive(barrier_id=FULL + group, number_of_threads=WARP_TOO)


@cute.jit
def add_registers(target, fragment):
    """Adds a fragment to sums in global memory: registers in fours, those of 128 threads in a row; `target`: of the thread's first."""
    for four in cutlass.range_constexpr(cute.size(fragment) // 4):
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[(target + 4 * GROUP_THREADS * four).toint(), *(fragment[4 * four + i] for i in range(4))],
        )


@cute.jit
def store_registers(target, fragment):
    """Where nobody else adds: as `add_registers`, without what was there before."""
    fours = cute.size(fragment) // 4
    laid_out = cute.make_tensor(target, cute.make_layout((4, fours), stride=(1, 4 * GROUP_THREADS)))
    cute.autovec_copy(cute.make_tensor(fragment.iterator, cute.make_layout((4, fours))), laid_out)


def own_numbers(x, first, thread):
    """A thread's first of the numbers of a warpgroup's fragment that begin at `first`, a multiple of 4, in a float32 tensor."""
    return x.iterator + cute.assume(first + (thread % GROUP_THREADS) * 4, divby=4)


@cute.jit
def sum_of_fragments(x, first, step, count: cutlass.Constexpr, total, thread):
    """`total`: the sum of `count` fragments that `store_registers` laid out, the first of them at `first`, `step` numbers apart."""
    read_registers(own_numbers(x, first, thread), total)
    if cutlass.const_expr(count > 1):
        part = cute.make_rmem_tensor(cute.size(total), Float32)
        for i in cutlass.range(1, count, unroll=1):
            read_registers(own_numbers(x, first + Int64(i) * step, thread), part)
            for j in cutlass.range_constexpr(cute.size(total)):
                total[j] = total[j] + part[j]


@cute.jit
def empty_part(group):
    """The buffer's part is empty; the adding warp says so before the first step."""
    cute.arch.barrier_arrive(barrier_id=EMPTY + group, number_of_threads=WARP_TOO)


@cute.jit
def add_part(buffer, target, group, size: cutlass.Constexpr):
    """Adds a warpgroup's part to the sums in global memory once it is there; for the adding warp."""
    cute.arch.barrier(barrier_id=FULL + group, number_of_threads=WARP_TOO)
    add_floats(buffer.iterator + group * size, target + group * size, size)
    cute.arch.barrier_arrive(barrier_id=EMPTY + group, number_of_threads=WARP_TOO)


@cute.jit
def add_part_in_turn(buffer, target, group, size: cutlass.Constexpr, turns, block, rank):
    """As `add_part`, when `rank` other blocks of keys have added to this block of queries."""
    cute.arch.barrier(barrier_id=FULL + group, number_of_threads=WARP_TOO)
    wait_for_turn(turns, block, group, rank)
    add_floats(buffer.iterator + group * size, target + group * size, size)
    cute.arch.barrier_arrive(barrier_id=EMPTY + group, number_of_threads=WARP_TOO)
    end_turn(turns, block, group)


# --- device side: the same with a queue, where the writing warps store gradients of keys and values, too ----------------------------------
# Each warpgroup has a part of a buffer, and a warp that writes it to global memory. An order says where: a number of a block of queries, to
# whose sums the part is added, or one of these.

STORE_DK, STORE_DV, FINISH = -1, -2, -3


@cute.jit
def hand_order(orders, order, group, thread):
    """Waits for the part to be free, then tells its warp; what is in the part was written in between by `hand_floats` or `hand_rows`."""
    cute.arch.barrier(barrier_id=EMPTY + group, number_of_threads=WARP_TOO)
    _tell(orders, order, group, thread)


@cute.jit
def _tell(orders, order, group, thread):
    if thread == 0:
        for i in cutlass.range_constexpr(4):
            orders[i, group] = Int32(order[i])
    publish_shared()
    cute.arch.barrier_arrive(barrier_id=FULL + group, number_of_threads=WARP_TOO)


@cute.jit
def hand_floats(parts, fragment, orders, order, group, thread):
    """A fragment of the queries' gradient, to be added: a thread's registers in fours, those of 128 threads in a row."""
    cute.arch.barrier(barrier_id=EMPTY + group, number_of_threads=WARP_TOO)
    fours = cute.size(fragment) // 4
    target = cute.make_tensor(parts[None, group].iterator + thread * 4, cute.make_layout((4, fours), stride=(1, 512)))
    cute.autovec_copy(cute.make_tensor(fragment.iterator, cute.make_layout((4, fours))), target)
    _tell(orders, order, group, thread)


@cute.jit
def hand_rows(product, fragment, factor, parts, layout, orders, order, group, slot, thread, dtype: cutlass.Constexpr):
    """A fragment of the keys' or values' gradient times a factor, as 16-bit numbers in a warpgroup's part of a buffer, to be stored by the
    warp that takes the orders of a slot."""
    cute.arch.barrier(barrier_id=EMPTY + slot, number_of_threads=WARP_TOO)
    stage_rows(product, fragment, factor, part_of(parts, group, layout, dtype), thread, dtype)
    _tell(orders, order, slot, thread)


def part_of(parts, group, layout, dtype):
    """A warpgroup's part of the buffer as rows of 16-bit numbers."""
    return recast_buffer(parts[None, group], layout, dtype)


@cute.jit
def take_back(part):
    """The part is free again; the writing warp says so, also before the first order."""
    cute.arch.barrier_arrive(barrier_id=EMPTY + part, number_of_threads=WARP_TOO)


@cute.jit
def next_order(orders, part):
    """Waits for the next order of a warpgroup."""
    cute.arch.barrier(barrier_id=FULL + part, number_of_threads=WARP_TOO)
    return tuple([cute.arch.make_warp_uniform(orders[i, part]) for i in range(4)])


@cute.jit
def wait_for_store():
    """Until the bulk store that this warp has started has read shared memory."""
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()


@cute.jit
def read_part(sums, tile, part, group, size: cutlass.Constexpr, thread):
    """What `fill_part` or `hand_floats` laid out for a warpgroup, from global memory."""
    for i in cutlass.range_constexpr(len(part)):
        place = group * size + GROUP_THREADS * numbers_before(part, i)
        read_registers(own_numbers(sums, Int64(tile) * (GROUPS * size) + place, thread), part[i])


@cute.jit
def read_registers(source, fragment):
    """A fragment from global memory: registers in fours, those of 128 threads in a row; `source`: of the thread's first."""
    fours = cute.size(fragment) // 4
    found = cute.make_tensor(source, cute.make_layout((4, fours), stride=(1, 4 * GROUP_THREADS)))
    cute.autovec_copy(found, cute.make_tensor(fragment.iterator, cute.make_layout((4, fours))))


# --- device side: results -----------------------------------------------------------------------------------------------------------------


@cute.jit
def stage_rows(product, fragment, factor, shared, thread, dtype: cutlass.Constexpr, is_flipped: cutlass.Constexpr = False):
    """Both warpgroups' fragments times a factor, as 16-bit numbers, into shared memory (rows, columns), where a bulk copy can read them.

    Where `is_flipped`, rows of the fragment are columns of the memory.
    """
    rounded = cute.make_rmem_tensor(fragment.layout, dtype)
    for i in cutlass.range_constexpr(cute.size(fragment) // 2):
        pair = cute.make_tensor(fragment.iterator + 2 * i, 2).load() * factor
        cute.make_tensor(rounded.iterator + 2 * i, 2).store(pair.to(dtype))
    matrices = 2 if cute.size(fragment, mode=[0]) % 8 else 4  # at once, of 8 by 8 numbers: a warp's columns are whole 8s or whole 16s
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(is_flipped, matrices), dtype)
    copy = cute.make_tiled_copy_C(atom, product).get_slice(thread)
    target = copy.partition_D(cute.make_tensor(shared.iterator, cute.select(shared.layout, mode=[1, 0])) if is_flipped else shared)
    cute.copy(copy, copy.retile(rounded), target)
    publish_shared()


@cute.jit
def row_product(x, y, batch, head, row, part, parts: cutlass.Constexpr, dim: cutlass.Constexpr):
    """Sum over a thread's eighths of x * y in one row of tensors [batch, heads, tokens, dim], `parts` threads a row."""
    total = Float32(0.0)
    for step in cutlass.range_constexpr((dim // 8 + parts - 1) // parts):
        piece = part + step * parts
        if piece < dim // 8:
            left = cute.local_tile(x[batch, head, row, None], (8,), (piece,)).load().to(Float32)
            right = cute.local_tile(y[batch, head, row, None], (8,), (piece,)).load().to(Float32)
            total = total + (left * right).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    return cute.arch.warp_reduction_sum(total, threads_in_group=parts)


def recast_buffer(buffer, layout, dtype):
    """A buffer's memory with the layout of a result that is stored from it."""
    return cute.make_tensor(cute.recast_ptr(buffer.iterator, layout.inner, dtype=dtype), cute.select(layout.outer, mode=[0, 1]))
