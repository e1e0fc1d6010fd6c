"""From a checkpoint directory to a model that runs.

Opening is cheap and finds what is wrong with the files: config, headers of all tensors, tokenizer,
token map. Loading streams the weights to the device, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from pcpkit.config import ModelConfig, ParallelConfig
from pcpkit.model.checkpoint import CheckpointReader
from pcpkit.model.decoder import Numerics, TextModel
from pcpkit.model.engram_tables import EngramHash, load_token_map
from pcpkit.model.tokenizer import load_tokenizer
from pcpkit.model.weights import load_weights
from pcpkit.parallel.collectives import check_backend
from pcpkit.parallel.groups import Groups, single_rank
from pcpkit.parallel.tp import Reduce

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LoadProgress = Callable[[int, int], None]
"""Is told (bytes read so far, bytes in all) after every tensor; memory maps count as read."""


def ignore_progress(done: int, total: int) -> None:
    """The callback that does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenCheckpoint:
    """A checkpoint directory whose files fit together; no weights are read yet."""

    directory: Path
    config: ModelConfig
    reader: CheckpointReader
    engram: EngramHash | None
    """Hash constants; None for a model without Engram layers."""
    tokenizer: Tokenizer | None
    """None if the directory has none: token ids still work."""


def open_checkpoint(directory: str | Path) -> OpenCheckpoint:
    """Read everything of a checkpoint but its weights.

    Raises:
        ValueError: the directory, config.json, a tensor header, the tokenizer or the token map is
            missing or wrong (ConfigError and CheckpointError are ValueErrors).
        ImportError: there is a tokenizer, but the extra `text` is not installed.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ValueError(
            f"checkpoint expected a directory, got {folder}, which is none; pass the folder that "
            "holds config.json and the safetensors files"
        )
    config = ModelConfig.from_file(folder)
    reader = CheckpointReader(folder, config)
    engram = None
    if config.engram_layer_ids:
        engram = EngramHash.from_config(config, load_token_map(folder))
    return OpenCheckpoint(
        directory=folder,
        config=config,
        reader=reader,
        engram=engram,
        tokenizer=load_tokenizer(folder),
    )


def load_model(
    checkpoint: OpenCheckpoint | str | Path,
    *,
    device: torch.device | str = "cpu",
    numerics: Numerics = "released",
    max_model_len: int | None = None,
    groups: Groups | None = None,
    reduce: Reduce = "fast",
    progress: LoadProgress = ignore_progress,
) -> TextModel:
    """Load a model, or this rank's part of it.

    Args:
        checkpoint: from `open_checkpoint`, or the directory.
        device: where weights and caches live; Engram tables stay on the host: memory-mapped beside
            a CPU, page-locked beside a GPU.
        numerics: `released` or `weight_only`.
        max_model_len: longest request in tokens; None is the config's maximum.
        groups: this rank's groups; None is a model on one rank. Only the rank's slice is read: its
            heads, output groups, vocabulary and Engram rows (tensor parallel), and its experts.
        reduce: how sums over ranks are taken: `ordered` gives the bits of one rank, `fast` leaves
            the order to the backend.
        progress: see `LoadProgress`.

    Raises:
        ValueError: as `open_checkpoint`, an unknown `reduce`, `max_model_len` above the config's
            maximum, a model that cannot be split over the groups, or groups whose backend does not
            serve the device.
        ImportError: as `open_checkpoint`.
    """
    opened = checkpoint if isinstance(checkpoint, OpenCheckpoint) else open_checkpoint(checkpoint)
    config = opened.config
    ranks = single_rank() if groups is None else groups
    if reduce not in get_args(Reduce):
        raise ValueError(
            f"reduce expected one of {', '.join(get_args(Reduce))}, got {reduce!r}; pick one"
        )
    check_groups(config, ranks, torch.device(device))
    count = config.n_routed_experts // ranks.ep.size
    weights = load_weights(
        config,
        _slice(opened.reader, ranks, progress),
        first_expert=ranks.ep.rank * count,
        num_local_experts=count,
        device=device,
    )
    return TextModel(
        config,
        weights,
        opened.engram,
        max_model_len=config.max_position_embeddings if max_model_len is None else max_model_len,
        numerics=numerics,
        groups=ranks,
        reduce=reduce,
    )


def check_groups(config: ModelConfig, groups: Groups, device: torch.device) -> None:
    """Refuse groups that the model cannot be split over, or that cannot exchange its tensors.

    Raises:
        ValueError: see `ParallelConfig.validate`; expert-parallel ranks that are neither one nor
            all; a backend that does not serve the device.
    """
    parallel = ParallelConfig(
        tp_size=groups.tp.size, pcp_size=groups.pcp.size, expert_parallel=groups.ep.size > 1
    )
    if groups.ep.size != parallel.ep_size:
        raise ValueError(
            f"ep group expected 1 or tp x pcp = {parallel.world_size} ranks, got {groups.ep.size}; "
            "start the groups with ParallelConfig"
        )
    parallel.validate(config)
    check_backend(groups, device)


def resolve_device(name: str) -> torch.device:
    """The device of `auto`, `cpu` or `cuda`.

    `auto` is CUDA where it can run the model, else the CPU.

    Raises:
        ValueError: another name, or CUDA that cannot run the model.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device expected auto, cpu or cuda, got {name!r}; pick one")
    if name == "cpu":
        return torch.device("cpu")
    problem = _cuda_problem()
    if problem is not None and name == "auto":
        return torch.device("cpu")
    if problem is not None:
        raise ValueError(f"device expected a usable CUDA device, got {problem}; use cpu or auto")
    return torch.device("cuda")


def _cuda_problem() -> str | None:
    """Why the model cannot run on CUDA, None if it can."""
    if not torch.cuda.is_available():
        return "none on this machine"
    missing = sorted(_ops_for("CPU") - _ops_for("CUDA"))
    if not missing:
        return None
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"no CUDA kernel for {', '.join(missing[:3])}{more} in this version"


def _ops_for(key: str) -> set[str]:
    """Names of pcpkit's operators that have an implementation for a dispatch key."""
    # torch has no public way to ask; the model's import has registered all of them.
    registered: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    names = (name.split("::", 1) for name in registered)
    return {parts[1] for parts in names if parts[0] == "pcpkit"}


def _slice(
    reader: CheckpointReader, groups: Groups, progress: LoadProgress
) -> Iterator[tuple[str, Tensor]]:
    """The rank's tensors, counted."""
    tp, ep = groups.tp, groups.ep
    total, done = reader.num_bytes(tp.rank, tp.size, ep.rank, ep.size), 0
    for name, tensor in reader.stream(tp.rank, tp.size, ep.rank, ep.size):
        yield name, tensor
        done += tensor.nbytes
        progress(done, total)
