"""Which of the two forms of MLA a prompt takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.attention.base import LatentUp

MlaForm = Literal["auto", "absorbed", "expanded"]
EXPANDED_NUMBERS = 16 * 2**20  # keys and values expanded at once: 64 MiB in fp32


@dataclass(frozen=True, slots=True)
class MlaSizes:
    """Numbers of one head: its key without the rotated part, its value; and of the latent."""

    nope: int
    value: int
    rank: int

    @classmethod
    def of(cls, up: LatentUp) -> MlaSizes:
        return cls(up.key.shape[1], up.value.shape[1], up.key.shape[2])


def expands(form: MlaForm, queries: int, keys: int, sizes: MlaSizes, latent: int) -> bool:
    """Whether keys and values are expanded to full heads; "auto": where it costs fewer products.

    Per head: attending over latents is wider, but expanding costs every key, also cached ones.
    """
    if form != "auto":
        return form == "expanded"
    projection = sizes.rank * (sizes.nope + sizes.value)  # of one token
    head = sizes.nope + latent - sizes.rank
    absorbed = queries * projection + queries * keys * 2 * latent
    expanded = keys * projection + queries * keys * 2 * head
    return expanded < absorbed


def heads_at_once(keys: int, head_dim: int) -> int:
    """How many heads are expanded at a time, so that they fit in EXPANDED_NUMBERS."""
    return max(1, EXPANDED_NUMBERS // (2 * keys * head_dim))
