"""Ranks: groups, collectives, traces, virtual ranks, and the steps that exchange data."""

from pcpkit.config import ParallelConfig as ParallelConfig
