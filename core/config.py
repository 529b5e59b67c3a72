"""The configuration: one frozen tree, built through ``load`` (constructors do not check types).

Cross-field rules live in ``__post_init__`` and raise ValueError, which msgspec reports with the
path of the struct. "auto" and 0 are resolved once, by cluster/plan.py, into a new tree.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from core.errors import ConfigError
from core.wire import RankId, Role

HIDDEN = "..."  # shown instead of a secret
INLINE_SILENCE_S = 8.0  # a fence of an engine in the rank takes up to 5 s


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights, under which name."""

    source: str = "smollm2-135m"  # a built-in name, a local folder, or a hub name "owner/model"
    served_name: str = ""  # what clients send as "model"; empty: the source's own name
    aliases: tuple[str, ...] = ()  # more names for it; an answer carries the one that was asked for
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bf16 where the CPU has it
    context_len: int = 0  # tokens of one request, prompt and output; 0: what the model was made for

    def __post_init__(self) -> None:
        _require(bool(self.source), "model.source is empty: give a folder or a name")
        _require(all(self.aliases), "model.aliases must not hold an empty name")
        _require(self.context_len >= 0, "context_len must be 0 (the model's own) or more")


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scalable pool of one role: equal replicas with equal ranks."""

    replicas: int = 1  # one rank each
    threads: int = 0  # OpenMP threads of each rank; 0: the machine's cores shared out
    attention: str = "auto"  # a name in worker/attention/registry.py; auto: the best installed
    kv_tokens: int = 0  # size of each rank's KV pool; 0: from kv_memory_mib
    kv_memory_mib: int = 1024  # of each rank's KV pool, where kv_tokens is 0
    page_size: int = 1  # tokens of one KV page; the same for prefill and decode
    max_running: int = 64  # sequences in one step
    step_tokens: int = 512  # tokens in one step: the size of a prefill chunk
    overlap: bool = False  # prepare a step while the one before runs; of no use on a CPU
    schedule: Literal["fcfs", "lpm", "dfs_weight"] = "fcfs"  # who starts first, within a priority
    conservativeness: float = 1.0  # scales the pages kept free for output; more retracts less
    watchdog_s: float = 30.0  # a longer step is logged with its thread's stack; 0: never

    def __post_init__(self) -> None:
        _require(self.replicas >= 1, "replicas must be at least 1")
        _require(self.threads >= 0, "threads must be 0 (auto) or more")
        _require(self.max_running >= 1, "max_running must be at least 1")
        _require(self.step_tokens >= 1, "step_tokens must be at least 1")
        _require(self.conservativeness >= 0, "conservativeness must be 0 (keep none free) or more")
        _require(self.kv_tokens >= 0, "kv_tokens must be 0 (auto) or more")
        _require(self.kv_memory_mib >= 1, "kv_memory_mib must be at least 1")
        _require(self.page_size >= 1, "page_size must be at least 1")
        _require(
            self.kv_tokens % self.page_size == 0,
            f"kv_tokens={self.kv_tokens} must be a multiple of page_size={self.page_size}",
        )
        _require(self.watchdog_s >= 0, "watchdog_s must be 0 (off) or more")


class DisaggConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How KV crosses from prefill to decode."""

    transport: Literal["mooncake", "mooncake_inline"] = "mooncake"  # inline: engine in the rank
    protocol: Literal["tcp", "rdma"] = "tcp"  # of Mooncake
    device: str = ""  # the RDMA device; empty for TCP
    local_prefill: Literal["auto", "off"] | int = "auto"  # tokens decode ranks compute
    checksum: Literal["off", "sample", "all"] = "sample"  # of KV: of 1 in 64 rooms, or every byte
    claim_timeout_s: float = 60.0  # prefill gives up on a room that no decode rank claimed
    peer_timeout_s: float = 4.5  # a peer that answered no heartbeat for this long is lost

    def __post_init__(self) -> None:
        _require(
            isinstance(self.local_prefill, str) or self.local_prefill >= 0,
            "local_prefill must be auto, off, or a number of tokens",
        )
        _require(self.claim_timeout_s > 0, "claim_timeout_s must be positive")
        _require(self.peer_timeout_s > 0, "peer_timeout_s must be positive")


class CacheAwareConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the policy cache_aware weighs a prompt's cost on a rank."""

    own_work_weight: float = 1.0  # of its uncached work, against its wait: more sticks to caches
    eviction_weight: float = 3.0  # of each token it would evict; 0: evicting costs nothing
    reuse_horizon_s: float = 120.0  # a prefix unused for this long is worth a third

    def __post_init__(self) -> None:
        _require(self.own_work_weight >= 0, "own_work_weight must be 0 or more")
        _require(self.eviction_weight >= 0, "eviction_weight must be 0 or more")
        _require(self.reuse_horizon_s > 0, "reuse_horizon_s must be positive")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The front door."""

    host: str = "127.0.0.1"  # the address that HTTP and gRPC bind
    port: int = 8000  # 0: any free one
    grpc: bool = True  # serve antiphon.v1 over gRPC too
    grpc_port: int = 9000  # on the same address; 0: any free one
    policy: str = "cache_aware"  # a name in router/policy/base.py
    cache_aware: CacheAwareConfig = CacheAwareConfig()  # of that policy
    tokenizer: str = "hf"  # a name in router/text/tokenizer.py
    # of requests that do not say; model: as its generation_config.json recommends
    sampling_defaults: Literal["model", "none"] = "model"
    queue_limit: int = 512  # live choices of all requests; more get 429 with Retry-After
    body_limit_mib: int = 16  # a larger request body gets 413
    rank_timeout_s: float = 4.5  # a rank that answered no heartbeat for this long is lost
    reroute_wait_s: float = 30.0  # how long a stream without a complete route waits for one
    max_output_tokens: int = 0  # of one choice; asking for more is refused; 0: the context
    max_choices: int = 128  # of one request: n (or best_of) times prompts
    request_timeout_s: float = 0.0  # a request that takes longer is ended; 0: no limit
    api_keys: tuple[str, ...] = ()  # each may be env:NAME or file:/path; empty: everybody may ask
    admin_key: str = ""  # the same; opens /admin too; empty: /admin is for loopback hosts only
    salt_by_key: bool = False  # requests share cached prefixes only with those of the same key
    tls_cert: str = ""  # PEM file with the certificate chain of both fronts; empty: no TLS
    tls_key: str = ""  # PEM file with its private key, without a passphrase
    tls_client_ca: str = ""  # PEM file; clients must show a certificate that one of it has signed

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port must be between 0 (any free one) and 65535")
        _require(
            0 <= self.grpc_port <= 65535, "grpc_port must be between 0 (any free one) and 65535"
        )
        _require(
            not self.grpc or self.port != self.grpc_port or not self.port,
            "port and grpc_port must differ",
        )
        _require(self.queue_limit >= 1, "queue_limit must be at least 1")
        _require(
            self.max_output_tokens == 0 or self.max_output_tokens >= 16,
            "max_output_tokens must be 0 (no limit) or at least 16, a completion's default",
        )
        _require(self.max_choices >= 1, "max_choices must be at least 1")
        _require(self.request_timeout_s >= 0, "request_timeout_s must be 0 (no limit) or more")
        _require(all(self.api_keys), "api_keys must not hold an empty key")
        _require(not self.salt_by_key or bool(self.api_keys), "salt_by_key needs api_keys")
        _require(bool(self.tls_cert) == bool(self.tls_key), "tls_cert and tls_key go together")
        _require(not self.tls_client_ca or bool(self.tls_cert), "tls_client_ca needs tls_cert")

    def __repr__(self) -> str:
        """Without the keys: a configuration may be logged."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown.update(api_keys=HIDDEN, admin_key=HIDDEN)
        return f"RouterConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class LeaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the supervisor and the ranks find out that the other is gone. Not with runtime local."""

    renew_s: float = 1.0  # pause between two renewals of a rank's lease
    lease_s: float = 10.0  # a rank that answers none for this long is killed and replaced
    stuck_limit_s: float | Literal["off"] = 60.0  # a rank in one step for this long, likewise
    orphan_s: float = 30.0  # a rank that nobody renews for this long ends itself

    def __post_init__(self) -> None:
        _require(self.renew_s > 0, "renew_s must be positive")
        _require(self.lease_s >= 2 * self.renew_s, "lease_s must be at least two times renew_s")
        _require(
            self.orphan_s > self.lease_s,
            "orphan_s must be more than lease_s: the supervisor gives a rank up first",
        )
        _require(
            isinstance(self.stuck_limit_s, str) or self.stuck_limit_s > 0,
            "stuck_limit_s must be positive, or off",
        )


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where ranks run."""

    runtime: Literal["ray", "process", "local"] = "ray"  # process: no Ray; local: for tests
    address: str = "local"  # "local" starts Ray on this machine; else the head's host:port
    host: str = "127.0.0.1"  # the address ranks bind and announce
    start_timeout_s: float = 120.0  # to start a rank; with Ray, place included
    lease: LeaseConfig = LeaseConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "warning"  # of router and ranks
    log_format: Literal["text", "json"] = "text"  # json: one object a line


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spans of each request, from router and ranks: off unless ``endpoint`` or ``file`` is set."""

    endpoint: str = ""  # an OTLP collector, e.g. http://localhost:4317; https: with TLS
    protocol: Literal["grpc", "http"] = "grpc"  # of that collector; http is port 4318 as a rule
    file: str = ""  # append them here, one JSON object a line; each machine writes its own
    sample: float = 1.0  # share of requests traced; a caller's traceparent decides for itself

    def __post_init__(self) -> None:
        _require(
            not self.endpoint or self.endpoint.startswith(("http://", "https://")),
            "tracing.endpoint must start with http:// or https://",
        )
        _require(0 <= self.sample <= 1, "sample must be between 0 and 1")

    @property
    def on(self) -> bool:
        """Whether anything is traced."""
        return bool(self.endpoint or self.file)


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one cluster. Either ``unified``, or ``prefill`` and ``decode``."""

    model: ModelConfig = ModelConfig()
    prefill: GroupConfig | None = None
    decode: GroupConfig | None = None
    unified: GroupConfig | None = None
    disagg: DisaggConfig = DisaggConfig()
    router: RouterConfig = RouterConfig()
    cluster: RuntimeConfig = RuntimeConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        if self.unified is not None:
            _require(
                self.prefill is None and self.decode is None,
                "a cluster has either `unified` or `prefill` and `decode`, not both",
            )
        else:
            _require(
                self.prefill is not None and self.decode is not None,
                "name both `prefill` and `decode`, or `unified` alone",
            )
            _require(
                len({group.page_size for group in self.groups.values()}) == 1,
                "page_size must be the same for prefill and decode, or no KV crosses",
            )
            silence_s = min(self.disagg.peer_timeout_s, self.router.rank_timeout_s)
            _require(
                self.disagg.transport != "mooncake_inline" or silence_s >= INLINE_SILENCE_S,
                "with mooncake_inline a rank stands still for seconds while it fences: "
                "set disagg.peer_timeout_s and router.rank_timeout_s to 8 or more",
            )

    @property
    def groups(self) -> dict[Role, GroupConfig]:
        """The groups this cluster has, in request order."""
        named = {
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
            Role.UNIFIED: self.unified,
        }
        return {role: group for role, group in named.items() if group is not None}


class RankSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that one rank's process needs to start, made by cluster/plan.py.

    Nothing in it is left to "auto" but the attention backend, which depends on the device."""

    rank: RankId
    role: Role
    folder: str  # of the model
    served_name: str
    dtype: Literal["bfloat16", "float32"]
    context_len: int  # tokens of one request
    host: str  # what to bind and announce
    group: GroupConfig
    disagg: DisaggConfig
    lease: LeaseConfig = LeaseConfig()
    tracing: TracingConfig = TracingConfig()
    log_level: str = "warning"
    log_format: str = "text"


def load(tree: Any) -> ClusterConfig:  # opaque: parsed YAML
    """Build a ClusterConfig from plain dicts; raises ConfigError naming the path and the fix."""
    try:
        return msgspec.convert(tree, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from error
