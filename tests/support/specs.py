"""Small ModelSpecs without a checkpoint. No torch."""

from __future__ import annotations

from msgspec.structs import replace

from worker.model_spec import MlaSpec, ModelSpec, MoeSpec, RopeSpec


def dense(layers: int = 2, heads: int = 6, kv_heads: int = 2, head_dim: int = 16) -> ModelSpec:
    """A Llama."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        layers=layers,
        hidden=32,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=64,
        vocab=100,
        context_len=512,
        norm_eps=1e-6,
        eos_token_ids=(2,),
        tie_embeddings=False,
        dtype="float32",
        rope=RopeSpec(theta=10_000.0),
    )


def latent(layers: int = 2, heads: int = 4, kv_lora_rank: int = 24) -> ModelSpec:
    """A DeepSeek without experts."""
    return ModelSpec(
        architecture="DeepseekV3ForCausalLM",
        layers=layers,
        hidden=32,
        heads=heads,
        kv_heads=heads,
        head_dim=24,
        intermediate=64,
        vocab=100,
        context_len=512,
        norm_eps=1e-6,
        eos_token_ids=(2,),
        tie_embeddings=False,
        dtype="float32",
        rope=RopeSpec(theta=10_000.0),
        mla=MlaSpec(
            q_lora_rank=None,
            kv_lora_rank=kv_lora_rank,
            nope_dim=16,
            rope_dim=8,
            v_dim=12,
            interleaved=True,
        ),
    )


def latent_of(heads: int, rank: int, nope: int, rope: int, v_dim: int) -> ModelSpec:
    """One layer of a DeepSeek with these sizes."""
    mla = MlaSpec(
        q_lora_rank=None,
        kv_lora_rank=rank,
        nope_dim=nope,
        rope_dim=rope,
        v_dim=v_dim,
        interleaved=True,
    )
    return replace(latent(layers=1, heads=heads), head_dim=nope + rope, mla=mla)


def mixture(method: str = "noaux_tc", **changes: object) -> MoeSpec:
    """Eight experts in four groups, three chosen out of two groups."""
    values: dict[str, object] = {
        "experts": 8,
        "topk": 3,
        "intermediate": 16,
        "shared_experts": 1,
        "method": method,
        "groups": 4,
        "topk_groups": 2,
        "norm_topk": True,
        "scaling": 2.5,
        "layers": frozenset({1}),
    }
    return MoeSpec(**(values | changes))  # type: ignore[arg-type] # values are of mixed types
