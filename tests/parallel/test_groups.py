"""Who is in which group (pcp-spec section 0.3), and the group of one rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.config import ParallelConfig
from pcpkit.parallel.groups import SingleRank, group_members, single_rank

configs = st.builds(
    ParallelConfig,
    tp_size=st.integers(1, 8),
    pcp_size=st.integers(1, 8),
    expert_parallel=st.booleans(),
)


@given(config=configs)
def test_groups_follow_the_world_layout(config: ParallelConfig) -> None:
    """TP consecutive ranks; PCP ranks of equal TP index, stride T; EP everyone or nobody else."""
    tp, world = config.tp_size, config.world_size
    for rank in range(world):
        members = group_members(config, rank)
        assert members["tp"] == [other for other in range(world) if other // tp == rank // tp]
        assert members["pcp"] == [other for other in range(world) if other % tp == rank % tp]
        assert members["ep"] == (list(range(world)) if config.expert_parallel else [rank])


@given(config=configs)
def test_sizes_and_ranks_of_groups(config: ParallelConfig) -> None:
    """World rank = PCP rank x T + TP rank, and every member lists the same group."""
    sizes = {"tp": config.tp_size, "pcp": config.pcp_size, "ep": config.ep_size}
    for rank in range(config.world_size):
        members = group_members(config, rank)
        place = {name: group.index(rank) for name, group in members.items()}
        assert rank == place["pcp"] * config.tp_size + place["tp"]
        assert {name: len(group) for name, group in members.items()} == sizes
        for name, group in members.items():
            assert all(group_members(config, peer)[name] == group for peer in group)


def test_the_docstring_example() -> None:
    config = ParallelConfig(tp_size=2, pcp_size=2, expert_parallel=True)
    assert group_members(config, 1) == {"tp": [0, 1], "pcp": [1, 3], "ep": [0, 1, 2, 3]}


@pytest.mark.parametrize("rank", [-1, 4])
def test_refuses_a_rank_outside_the_world(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"^rank expected 0 \.\. 3, got {rank}; start tp_size"):
        group_members(ParallelConfig(tp_size=2, pcp_size=2), rank)


def test_a_single_rank_returns_its_input() -> None:
    group = SingleRank("pcp")
    tensor = torch.arange(6).view(2, 3)
    assert (group.name, group.rank, group.size) == ("pcp", 0, 1)
    assert torch.equal(group.all_gather(tensor), tensor[None])
    assert group.all_reduce(tensor) is tensor
    assert torch.equal(group.reduce_scatter(tensor[None]), tensor)
    groups = single_rank()
    assert [groups.tp.name, groups.pcp.name, groups.ep.name] == ["tp", "pcp", "ep"]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_a_single_rank_refuses_parts_of_others(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^tensor expected shape \(1, \.\.\), got .* one part"):
        SingleRank("tp").reduce_scatter(torch.zeros(shape))
