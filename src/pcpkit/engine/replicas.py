"""Do all ranks hold the same? Tokens, logits and cache bytes, compared between ranks.

The caches are replicated: after every step each rank has every record, also of rows that another
rank computed. Ranks exchange digests, not the bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from torch import Tensor

from pcpkit.engine.record import CacheRecorder
from pcpkit.engine.request import RequestOutput
from pcpkit.engine.verify import named_bytes
from pcpkit.parallel.agreement import gather_bytes
from pcpkit.parallel.groups import Group


def compare_replicas(
    group: Group, outputs: Sequence[RequestOutput], recorder: CacheRecorder
) -> list[str]:
    """What a rank has that differs from the first rank's; every rank calls it.

    Args:
        group: the ranks, for CPU tensors.
        outputs: of this rank's engine.
        recorder: watched this rank's engine.

    Returns:
        One line a difference, the same lines on all ranks; empty if all hold the same.
    """
    digests = {
        f"request {output.request.request_id}: {name}": digest
        for output in outputs
        for name, digest in _digests(output, recorder).items()
    }
    told = [json.loads(data) for data in gather_bytes(group, json.dumps(digests).encode())]
    return [
        f"rank {rank}, {name} differs from rank 0"
        for rank, other in enumerate(told)
        for name in sorted(told[0].keys() | other.keys())
        if told[0].get(name) != other.get(name)
    ]


def _digests(output: RequestOutput, recorder: CacheRecorder) -> dict[str, str]:
    tensors = named_bytes(output, recorder.cache_bytes(output.request.request_id))
    return {"tokens": repr(output.token_ids)} | {
        name: _digest(tensor) for name, tensor in tensors.items()
    }


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
