"""Someone else's serving loop: its own layer and scheduler, on pcpkit's plan, ranks and kernels.

`python examples/embed.py [RANKS]` serves three requests on one rank and, as threads of this
process, on several. Tokens and cache bytes must be equal (exit code 1 if not). The layer attends
to the last 8 tokens and to some of the pooled pairs of tokens before them.
"""

import sys
from functools import partial

import torch
from torch import Tensor

from pcpkit.cache.pool import WINDOW_RECORD, CachePool
from pcpkit.kernels.cache_write import encode_records, scatter_records
from pcpkit.kernels.compressor import close_groups, write_ring
from pcpkit.kernels.linear import linear_bf16
from pcpkit.kernels.sparse_mla import sparse_mla
from pcpkit.parallel import ParallelConfig
from pcpkit.parallel.groups import Group, Groups
from pcpkit.parallel.pcp import gather_rows, pick_rows
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.plan.batch import StepBatch
from pcpkit.plan.partition import levelled, make_partition
from pcpkit.plan.step import StepPlan, plan_step

PROMPTS, NEW_TOKENS, CHUNK = ([5, 9, 2] * 7, [7, 7, 1], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]), 6, 7
VOCAB, DIM, HEADS, WINDOW, PAIRS, PAGE, RING = 32, 64, 2, 8, 4, 64, 2
NUMBERS = torch.randn(2 * VOCAB + 5 * DIM, DIM, generator=torch.Generator().manual_seed(0))
EMBED, OUT, QUERY, KEY, RAW = NUMBERS.bfloat16().split([VOCAB, VOCAB, HEADS * DIM, DIM, 2 * DIM])
NO_ROPE, NORM, SINKS = torch.empty(PAGE, 0), torch.ones(DIM).bfloat16(), torch.zeros(HEADS)
make_plan = partial(plan_step, ratios=(2,), block_size=PAGE, window_block_size=PAGE, ring_rows=RING)


def layer(plan: StepPlan, pool: CachePool, group: Group) -> Tensor:
    """Next tokens of the rows that want one, the same on every rank."""
    x, rows, wanted = EMBED[plan.token_ids], plan.layer_rows(0), plan.logits
    pairs, links = rows.groups[2], rows.links
    records = encode_records(linear_bf16(x, KEY), rows.positions, NO_ROPE, WINDOW_RECORD)
    gathered = gather_rows(group, records, rows.num_padded_rows)
    scatter_records(gathered, rows.window_slots, pool.window[0])
    raw, ring = linear_bf16(x, RAW, torch.float32), pool.ring[0]
    last = gather_rows(group, pick_rows(raw, links.last_rows), len(links.last_rows))
    latent = close_groups(raw, last, ring, pairs.closing_rows, links.predecessors, NORM, 1e-6)
    write_ring(last, links.open_rows, links.open_slots, ring)
    records = encode_records(latent, pairs.positions, NO_ROPE, pool.compressed_record)
    scatter_records(gather_rows(group, records, pairs.num_padded), pairs.slots, pool.compressed[0])
    selection = (rows.num_visible(2)[:, None] - 1 - 2 * torch.arange(PAIRS)).clamp(min=-1).int()
    query = (linear_bf16(x, QUERY).unflatten(1, (HEADS, DIM)), rows.positions, rows.row_request)
    window = (pool.window[0], plan.window_block_table, rows.window_floor)
    pooled = (pool.compressed[0], plan.block_table, selection)
    out = sparse_mla(*query, *window, *pooled, SINKS, DIM**-0.5, WINDOW, pool.compressed_record)
    out = gather_rows(group, (out.sum(1) + x)[wanted.local_rows], wanted.num_padded)
    return linear_bf16(out[wanted.restore_index], OUT, torch.float32).argmax(1)


def schedule(tokens: list[list[int]], done: list[int]) -> StepBatch:
    """Up to CHUNK rows of every request that goes on; request i owns page i of every cache."""
    live = [i for i, known in enumerate(tokens) if len(known) < len(PROMPTS[i]) + NEW_TOKENS]
    rows = [(i, done[i], min(len(tokens[i]) - done[i], CHUNK)) for i in live]
    request, computed, counts = torch.tensor(rows, dtype=torch.int32).unbind(1)
    return StepBatch(
        query_start_loc=torch.cat([counts[:1] * 0, counts.cumsum(0)]).int(),
        num_computed_tokens=computed,
        is_prefilling=torch.tensor([first < len(PROMPTS[i]) for i, first, _ in rows]),
        token_ids=torch.tensor([t for i, at, n in rows for t in tokens[i][at : at + n]]),
        lookback_token_ids=torch.empty(len(rows), 0, dtype=torch.int64),
        block_table=request[:, None],
        window_block_table=request[:, None],
        ring_blocks=request,
        num_logits=torch.tensor([at + n == len(tokens[i]) for i, at, n in rows]).int(),
    )


def serve(_: int, groups: Groups) -> tuple[list[list[int]], list[list[float]]]:
    """All requests to their end on one rank; every rank decides alike. Tokens and cache bytes."""
    window, pairs = torch.zeros(2, len(PROMPTS), PAGE, 66, dtype=torch.uint8)
    stores = {"window": {0: window}, "compressed": {0: pairs[:, ::2]}}
    ring = torch.zeros(len(PROMPTS), RING, 2 * DIM)
    pool = CachePool(**stores, index_keys={}, ring={0: ring}, compressed_record="mxfp8")
    tokens, done, group = [list(prompt) for prompt in PROMPTS], [0] * len(PROMPTS), groups.pcp
    while sum(map(len, tokens)) < sum(map(len, PROMPTS)) + NEW_TOKENS * len(PROMPTS):
        batch = schedule(tokens, done)
        lens, prefills = batch.query_lens.tolist(), batch.is_prefilling.tolist()
        partition = make_partition(lens, prefills, group.size, levelled)
        new = layer(make_plan(batch, partition=partition, rank=group.rank), pool, group).tolist()
        for i, count, wants in zip(batch.ring_blocks.tolist(), lens, batch.num_logits, strict=True):
            done[i] += count
            tokens[i] += [new.pop(0)] if wants else []
    return tokens, [tensor.flatten().tolist() for tensor in pool.tensors().values()]


if __name__ == "__main__":
    size = int(sys.argv[1]) if sys.argv[1:] else 2
    (expected,) = run_virtual_ranks(ParallelConfig(), serve)
    same = [one == expected for one in run_virtual_ranks(ParallelConfig(pcp_size=size), serve)]
    for prompt, tokens in zip(PROMPTS, expected[0], strict=True):
        print(f"{len(prompt):3} tokens, then {tokens[len(prompt) :]}")
    print(f"PCP {size} and PCP 1 {'agree bit for bit' if all(same) else f'differ: {same}'}")
    sys.exit(0 if all(same) else 1)
