"""The prefix-repetition workload: a few prefixes, many prompts that begin with one of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """Sizes of the workload; the defaults are the reference's.

    Raises:
        ValueError: a size is out of range, or the prompts cannot be dealt evenly to the prefixes.
    """

    num_prefixes: int = 10
    prefix_len: int = 1024
    suffix_len: int = 128
    num_prompts: int = 80
    num_warmups: int = 8
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("num_prefixes", "prefix_len", "suffix_len", "num_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} expected >= 1, got {getattr(self, name)}; raise it")
        if self.num_prompts % self.num_prefixes:
            raise ValueError(
                f"num_prompts expected a multiple of num_prefixes ({self.num_prefixes}), got "
                f"{self.num_prompts}; every prefix gets the same number of prompts"
            )
        if not 0 <= self.num_warmups <= self.num_prompts:
            raise ValueError(
                f"num_warmups expected 0 .. {self.num_prompts} (num_prompts), got "
                f"{self.num_warmups}; warm-ups are the first prompts"
            )

    @property
    def prompt_len(self) -> int:
        """Tokens of a prompt."""
        return self.prefix_len + self.suffix_len

    @property
    def num_uses(self) -> int:
        """Prompts with each prefix."""
        return self.num_prompts // self.num_prefixes

    @property
    def num_query_tokens(self) -> int:
        """Tokens of all requests, warm-ups included: 101,376 in the reference."""
        return (self.num_prompts + self.num_warmups) * self.prompt_len

    def most_hit_tokens(self, block_size: int) -> int:
        """What a cache that evicts nothing and computes nothing twice hits.

        The first request with each prefix finds nothing, a prompt that was a warm-up finds all full
        blocks before its last token, and any other those of the prefix.

        Example:
            >>> WorkloadShape().most_hit_tokens(64)  # 70 x 1,024 + 8 x 1,088
            80384
        """
        num_seen = self.num_warmups
        num_others = self.num_prompts - self.num_prefixes
        of_prefix = self.prefix_len // block_size * block_size
        of_prompt = (self.prompt_len - 1) // block_size * block_size
        return num_others * of_prefix + num_seen * of_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request, in the order they are sent.

    Attributes:
        prefix: number of its prefix.
        use: different prompts with that prefix sent by then, this one included. A prompt that is
            sent again uses its own blocks, and is no further use of what others share.
        is_warmup: sent before the measurement.
    """

    prefix: int
    token_ids: tuple[int, ...]
    use: int = 0
    is_warmup: bool = False


def with_other_tokens(prompts: Sequence[Prompt], vocab_size: int) -> list[Prompt]:
    """The same workload in other ids: what is equal stays equal, so every step has its shapes."""
    return [
        replace(prompt, token_ids=tuple(vocab_size - 1 - token for token in prompt.token_ids))
        for prompt in prompts
    ]


def make_workload(shape: WorkloadShape, vocab_size: int) -> list[Prompt]:
    """Warm-ups, then all prompts shuffled; the first prompts are the warm-ups, sent twice.

    Args:
        shape: sizes and the seed, which decides everything; the order is the same for any ids.
        vocab_size: ids are drawn from all of it.
    """
    source = random.Random(shape.seed)
    order = [number for number in range(shape.num_prefixes) for _ in range(shape.num_uses)]
    source.shuffle(order)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(vocab_size) for _ in range(count))

    prefixes = [draw(shape.prefix_len) for _ in range(shape.num_prefixes)]
    prompts = [
        Prompt(prefix=number, token_ids=prefixes[number] + draw(shape.suffix_len))
        for number in order
    ]
    sent = [replace(prompt, is_warmup=True) for prompt in prompts[: shape.num_warmups]] + prompts
    seen: dict[int, set[tuple[int, ...]]] = {}
    for place, prompt in enumerate(sent):
        different = seen.setdefault(prompt.prefix, set())
        different.add(prompt.token_ids)
        sent[place] = replace(prompt, use=len(different))
    return sent
