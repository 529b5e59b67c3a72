"""Attention backends over shapes: ``python -m bench.micro.attention [--threads 1] [--quick]``.

Prints a markdown table. Decode rows are judged by the memory they read, prompt chunks by the
products they compute; each as a share of what torch reaches on this machine in the same minute.
As many layers run as a model has, each with its own scattered slots, so that a step reads memory
and not the processor's cache (short contexts of few rows may stay in it). The second table is about
rows that begin with the same keys: read once for all of them, and once for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.micro import timing
from worker.attention.base import AttentionBackend, LatentUp
from worker.attention.cpu import CpuAttention
from worker.attention.registry import ATTENTION
from worker.cache.kv_pool import KVPool
from worker.model_spec import MlaSpec, ModelSpec, RopeSpec
from worker.pack import ForwardInput

CACHE_BYTES = 128 * 2**20  # read by a round over all layers
SLOTS = 16_384
GEMM = 1024  # size of the matrices that measure the peak


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a model. An MLA model has ``rank``: its latent is rank + rope numbers."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    rank: int = 0
    rope: int = 0

    def spec(self, layers: int) -> ModelSpec:
        """A model of these heads; what attention does not need is small."""
        mla = None
        if self.rank:
            nope = self.dim - self.rope
            mla = MlaSpec(
                q_lora_rank=None,
                kv_lora_rank=self.rank,
                nope_dim=nope,
                rope_dim=self.rope,
                v_dim=nope,
                interleaved=True,
            )
        return ModelSpec(
            architecture="LlamaForCausalLM",
            layers=layers,
            hidden=64,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            intermediate=64,
            vocab=64,
            context_len=SLOTS,
            norm_eps=1e-5,
            eos_token_ids=(),
            tie_embeddings=True,
            dtype="bfloat16",
            rope=RopeSpec(theta=1e4),
            mla=mla,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """``rows`` sequences of ``keys`` tokens, the last ``queries`` of which are new.

    The first ``common`` of them are the same for all.
    """

    shape: Shape
    rows: int
    keys: int
    queries: int
    common: int = 0

    def step(self) -> ForwardInput:
        order = torch.randperm(SLOTS)
        own = order[self.common :][: self.rows * (self.keys - self.common)].view(self.rows, -1)
        slots = torch.cat((order[: self.common].expand(self.rows, -1), own), dim=1)
        positions = torch.arange(self.keys - self.queries, self.keys).repeat(self.rows)
        tokens = self.rows * self.queries
        return ForwardInput(
            token_ids=torch.zeros(tokens, dtype=torch.int64),
            positions=positions,
            write_slots=slots[:, -self.queries :].reshape(-1),
            query_start=tuple(range(0, tokens + 1, self.queries)),
            kv_lens=(self.keys,) * self.rows,
            slots=tuple(slots),
            logit_rows=torch.arange(tokens),
        )

    @property
    def operations(self) -> float:
        """Of plain (expanded) attention: what its answer is worth."""
        shape = self.shape
        wide = 2 * shape.dim - shape.rope  # of a key and a value
        pairs = self.rows * self.queries * (self.keys - (self.queries - 1) / 2)
        return 2.0 * pairs * shape.heads * wide


SMOLLM = Shape("SmolLM2 9/3 x 64", 9, 3, 64)
LLAMA = Shape("Llama 32/8 x 128", 32, 8, 128)
DEEPSEEK = Shape("MLA 16 x (512+64)", 16, 16, 192, rank=512, rope=64)
CASES = tuple(
    Case(shape, *size)
    for shape in (SMOLLM, LLAMA, DEEPSEEK)
    for size in ((1, 320, 1), (16, 320, 1), (1, 5000, 1), (1, 512, 512), (1, 4096, 512))
)


# chats behind one system prompt; and rows without a common key, which must not pay for the others
SHARED = tuple(
    Case(shape, *size)
    for shape in (SMOLLM, DEEPSEEK)
    for size in ((16, 1088, 1, 1024), (16, 1152, 1, 1024), (4, 1120, 1, 1024), (16, 320, 1, 0))
)


def peaks(dtype: torch.dtype, repeats: int) -> tuple[float, float]:
    """(bytes a second read, operations a second multiplied) that torch reaches here."""
    memory = torch.zeros(CACHE_BYTES // 4)
    a, b = torch.randn(2, GEMM, GEMM).to(dtype)
    tries = 5 * repeats  # the peak is what everything is compared with
    read = CACHE_BYTES / timing.measure(memory.sum, tries).least
    return read, 2.0 * GEMM**3 / timing.measure(lambda: a @ b, tries).least


def measure(backend: AttentionBackend, case: Case, dtype: torch.dtype, repeats: int) -> float:
    """Seconds of one layer's attention, KV write included."""
    run, layers = prepare(backend, case, dtype)
    return timing.measure(run, repeats).least / layers


def prepare(
    backend: AttentionBackend, case: Case, dtype: torch.dtype
) -> tuple[Callable[[], object], int]:
    """The attention of all layers, and how many they are."""
    one = case.shape.spec(1).kv_numbers_per_token * dtype.itemsize * case.rows * case.keys
    most = 2 * CACHE_BYTES // (case.shape.spec(1).kv_numbers_per_token * dtype.itemsize * SLOTS)
    layers = max(1, min(CACHE_BYTES // one, most, 30))
    spec = case.shape.spec(layers)
    pool = KVPool(spec, SLOTS, dtype)
    for tensor in pool.k + pool.v + pool.latent:
        tensor.normal_()
    step, shape = case.step(), case.shape
    plan, tokens, scale = backend.plan(step), step.positions.shape[0], shape.dim**-0.5
    q = torch.randn(tokens, shape.heads, shape.dim).to(dtype)
    if shape.rank:
        latent = torch.randn(tokens, shape.rank + shape.rope).to(dtype)
        nope = shape.dim - shape.rope
        weight = (torch.randn(shape.heads, 2 * nope, shape.rank) / shape.rank**0.5).to(dtype)
        packed = backend.pack(LatentUp(weight[:, :nope], weight[:, nope:]))

        def layer(index: int) -> object:
            return backend.mla(plan, index, q, latent, packed, pool, scale)
    else:
        k = torch.randn(tokens, shape.kv_heads, shape.dim).to(dtype)

        def layer(index: int) -> object:
            return backend.mha(plan, index, q, k, k, pool, scale)

    return lambda: [layer(index) for index in range(layers)], layers


def compare(case: Case, dtype: torch.dtype, repeats: int) -> tuple[float, float]:
    """Seconds of one layer with common keys read once, and once a row; in turns, so that both
    meet the same machine.
    """
    runs = []
    for share in (True, False):
        torch.manual_seed(0)  # the same slots for both
        runs.append(prepare(CpuAttention(share=share), case, dtype))
    rounds = [
        [timing.measure(run, 1).least / layers for run, layers in runs] for _ in range(repeats)
    ]
    once, each = (min(seconds) for seconds in zip(*rounds, strict=True))
    return once, each


def table(dtype: torch.dtype, repeats: int) -> Iterator[str]:
    """The lines of one dtype's table."""
    read, multiply = peaks(dtype, repeats)
    yield f"{dtype}, {torch.get_num_threads()} threads: torch reads {read / 1e9:.1f} GB/s,"
    yield f"multiplies {multiply / 1e9:.0f} GFLOP/s.\n"
    yield "| heads | rows x keys, new | backend | µs | share of peak |"
    yield "|---|---|---|---:|---:|"
    for case in CASES:
        for name in ATTENTION.usable():
            seconds = measure(ATTENTION.load(name)(), case, dtype, repeats)
            if case.queries == 1:
                spec = case.shape.spec(1)
                size = spec.kv_numbers_per_token * dtype.itemsize * case.rows * case.keys
                share = f"{size / seconds / read:.0%} of reading"
            else:
                share = f"{case.operations / seconds / multiply:.0%} of multiplying"
            row = f"{case.rows} x {case.keys}, {case.queries}"
            yield f"| {case.shape.name} | {row} | {name} | {seconds * 1e6:.0f} | {share} |"


def shared_table(dtype: torch.dtype, repeats: int) -> Iterator[str]:
    """The lines of one dtype's table of common keys."""
    yield f"{dtype}, {torch.get_num_threads()} threads: common keys."
    yield "\n| heads | rows x (common + own) | read once, µs | once a row, µs | ratio |"
    yield "|---|---|---:|---:|---:|"
    for case in SHARED:
        once, each = compare(case, dtype, repeats)
        row = f"{case.rows} x ({case.common} + {case.keys - case.common})"
        micros = f"{once * 1e6:.0f} | {each * 1e6:.0f}"
        yield f"| {case.shape.name} | {row} | {micros} | {each / once:.2f} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="bfloat16 alone, three repeats")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats = 3 if options.quick else 9
    with torch.inference_mode():
        for dtype in (torch.bfloat16,) if options.quick else (torch.bfloat16, torch.float32):
            for line in table(dtype, repeats):
                print(line)
            print()
            if "cpu" in ATTENTION.usable():
                for line in shared_table(dtype, repeats):
                    print(line)
                print()


if __name__ == "__main__":
    main()
